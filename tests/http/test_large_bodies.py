"""Large bodies and long texts: refused before they cost anything, and their memory freed."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any

import msgspec
import pytest

from nanocore.client.chat.chat_messages import LONG_CHARS
from nanocore.client.tokenizer import Tokenizer
from nanocore.http import state
from nanocore.http.app import App
from nanocore.http.exchange import MAX_COMMAS, MAX_ITEMS, check_body_limits
from nanocore.http.http_errors import HttpError
from nanocore.http.server_settings import AppSettings
from nanocore.http.state import LARGE_BYTES
from tests.client.running import PATIENCE_S, run
from tests.http.asgi import Connection, app_of, ask, scope, turns
from tests.http.hostile_bodies import GOOD

CHAT = "/v1/chat/completions"
TOO_MANY = {
    "strings": ["a"] * (MAX_ITEMS + 1),
    "strings with escapes": ['\\"'] * (MAX_ITEMS + 1),
    "keys": {str(i): 1 for i in range(MAX_ITEMS + 1)},
    "lists": [[]] * MAX_ITEMS,
    "objects": [{}] * MAX_ITEMS,
    "lists after texts": ["\\[", *[[1]] * MAX_ITEMS],
    "numbers": [1] * (MAX_COMMAS + 2),
}


def body_of(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


@pytest.mark.parametrize(
    ("path", "what"),
    [*((path, "lists") for path in GOOD), *((CHAT, what) for what in TOO_MANY)],
)
def test_bodies_of_too_many_items_are_refused_before_they_are_decoded(
    monkeypatch: pytest.MonkeyPatch, path: str, what: str
) -> None:
    def decode(body: bytes) -> None:
        raise AssertionError("the body is decoded")

    monkeypatch.setattr(msgspec.json, "decode", decode)
    http = Connection(body_of({"metadata": TOO_MANY[what]}))
    app = App(AppSettings())
    run(app(scope(path=path, host="localhost"), http.receive, http.send))
    assert http.status == 413
    assert b"are read; send several requests" in http.body


@pytest.mark.parametrize(
    "value",
    [
        ["a"] * (MAX_ITEMS - 4),
        [[1]] * (MAX_ITEMS - 4),
        [1] * MAX_COMMAS,
        '"' * (3 * MAX_ITEMS),
        "[{" * MAX_ITEMS,
        ", " * (MAX_COMMAS + 4),
        ["\\" * 5, "[" * (MAX_ITEMS + 1), '\\"', "," * (MAX_COMMAS + 4), '"\\'],
    ],
)
def test_what_texts_hold_does_not_count(value: Any) -> None:
    check_body_limits(body_of({"metadata": value}))


def test_what_counts_is_said() -> None:
    with pytest.raises(HttpError, match=f"has {MAX_ITEMS + 2} lists and objects: at most"):
        check_body_limits(body_of({"messages": [{}] * MAX_ITEMS}))


@pytest.mark.parametrize("size", [LARGE_BYTES, AppSettings().max_body_bytes + 1])
async def test_memory_is_given_back_once_after_large_bodies(
    monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    loop, is_trimmed = asyncio.get_running_loop(), asyncio.Event()
    trims: list[int] = []

    def trim(padding: int) -> int:
        trims.append(padding)
        loop.call_soon_threadsafe(is_trimmed.set)
        return 1

    monkeypatch.setattr(state, "trim", trim)
    monkeypatch.setattr(state, "TRIM_DELAY_S", 0.0)
    app = App(AppSettings())

    async def send(num_bytes: int) -> None:
        http = Connection(b" " * num_bytes)
        await app(scope(path="/tokenize", host="localhost"), http.receive, http.send)
        assert http.status in (400, 413)

    await send(LARGE_BYTES - 1)
    assert not app.state.memory._is_due
    for _ in range(3):
        await send(size)
    await is_trimmed.wait()
    assert trims == [0]


def test_the_c_library_is_asked() -> None:
    assert state.trim(0) in (0, 1)


LONG = "12 + 13 " * (1 << 17)
MANY = [{"role": "user", "content": "a"}] * 2049
"""Messages; the demo model has room for 2048 tokens."""
TOO_LONG = {
    "/v1/completions": {"prompt": LONG},
    "/v1/completions, the last of several": {"prompt": ["a", "b", LONG]},
    "/v1/completions, echoed": {"prompt": [1] * 2049, "echo": True, "logprobs": 1, "max_tokens": 0},
    "/v1/embeddings": {"input": LONG},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": LONG}]},
    "/v1/chat/completions, many messages": {"messages": MANY},
    "/v1/chat/completions, special tokens": {
        "messages": [{"role": "user", "content": "<|im_end|>" * LONG_CHARS}]
    },
    "/v1/messages": {"max_tokens": 1, "messages": [{"role": "user", "content": LONG}]},
    "/v1/messages, many messages": {"max_tokens": 1, "messages": MANY},
    "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": LONG}]},
    "/v1/responses": {"input": LONG},
    "/v1/responses, many messages": {"input": MANY},
    "/tokenize": {"messages": [{"role": "user", "content": LONG}]},
}


@pytest.mark.parametrize("what", TOO_LONG)
def test_what_is_far_too_long_is_refused_without_being_tokenized(
    demo_endpoint: str, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    encoding = Tokenizer._encoding
    num_chars = 0

    def counted(self: Tokenizer, text: str, add_special_tokens: bool) -> Any:
        nonlocal num_chars
        num_chars += len(text)
        return encoding(self, text, add_special_tokens)

    monkeypatch.setattr(Tokenizer, "_encoding", counted)
    answer = ask(demo_endpoint, what.partition(",")[0], TOO_LONG[what])
    assert answer.status_code == 400
    assert "max_model_len=2048" in answer.json()["error"]["message"]
    assert num_chars <= 2 * LONG_CHARS


@pytest.mark.parametrize(
    ("prompts", "named"),
    [
        (["a" * 10_000] * 100, "[0]"),
        (["a"] * 9 + ["a" * 10_000], "[9]"),
        ([[1], [1] * 2049], "[1]"),
        (["a b " * 200, "a b " * 2000, LONG], "max_model_len"),
    ],
)
def test_a_batch_costs_no_more_than_its_first_prompt_that_does_not_fit(
    demo_endpoint: str, monkeypatch: pytest.MonkeyPatch, prompts: Any, named: str
) -> None:
    encode, texts = Tokenizer.encode, []

    def counted(self: Tokenizer, text: str, *args: Any) -> list[int]:
        texts.append(text)
        return encode(self, text, *args)

    monkeypatch.setattr(Tokenizer, "encode", counted)
    answers = [
        ask(demo_endpoint, "/v1/completions", {"prompt": prompts}),
        ask(demo_endpoint, "/v1/embeddings", {"input": prompts}),
    ]
    assert [answer.status_code for answer in answers] == [400, 400]
    assert all(named in answer.json()["error"]["message"] for answer in answers)
    assert len(texts) <= len(answers)


def test_a_batch_of_too_many_samples_is_refused_before_it_is_tokenized(
    demo_endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def encode(self: Tokenizer, *_: Any) -> None:
        raise AssertionError("a prompt is tokenized")

    monkeypatch.setattr(Tokenizer, "encode", encode)
    answer = ask(demo_endpoint, "/v1/completions", {"prompt": ["a" * 5000] * 1000, "n": 5})
    assert answer.status_code == 400
    assert "the engine's queue of 4096: send fewer prompts" in answer.json()["error"]["message"]


def test_the_end_of_a_long_text_is_taken_if_it_is_to_be_truncated(demo_endpoint: str) -> None:
    text = LONG + "What is 12 + 13?"

    asked = {"max_tokens": 4, "temperature": 0, "seed": 1, "truncate_prompt_tokens": 300}
    cut = ask(demo_endpoint, "/v1/completions", {"prompt": text, **asked}).json()
    ids = ask(demo_endpoint, "/tokenize", {"prompt": text[-5000:]}).json()["tokens"]
    by_ids = ask(demo_endpoint, "/v1/completions", {"prompt": ids, **asked}).json()
    assert cut["usage"]["prompt_tokens"] == 300
    assert cut["choices"] == by_ids["choices"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": ["a" * 5000] * 100}),
        ("/v1/embeddings", {"input": ["a" * 5000] * 100}),
        ("/tokenize", {"prompt": "a" * 500_000}),
    ],
)
def test_who_leaves_ends_the_work_on_its_texts(
    demo_endpoint: str, monkeypatch: pytest.MonkeyPatch, path: str, body: Any
) -> None:
    encode, texts = Tokenizer.encode, []
    has_begun, may_end = threading.Event(), threading.Event()

    def slow(self: Tokenizer, text: str, *args: Any) -> list[int]:
        texts.append(text)
        has_begun.set()
        may_end.wait(PATIENCE_S)
        return encode(self, text, *args)

    async def scenario() -> None:
        async with app_of(demo_endpoint) as (app, _):
            assert app.state.client is not None
            await app.state.client.get_tokenizer()
            http = Connection(json.dumps(body).encode())
            asking = app(scope(path=path, host="localhost"), http.receive, http.send)
            request = asyncio.ensure_future(asking)
            await asyncio.to_thread(has_begun.wait)
            http.leave()
            await request
            may_end.set()
            await turns()
            await app.state.client.with_tokenizer(str, is_long=True)
            assert len(texts) == 1

    monkeypatch.setattr(Tokenizer, "encode", slow)
    run(scenario())
