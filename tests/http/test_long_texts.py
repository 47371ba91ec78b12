"""Texts that no model can take: refused before they cost others anything."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any

import pytest

from nanocore.client.chat.chat_messages import LONG_CHARS
from nanocore.client.tokenizer import Tokenizer
from tests.client.running import PATIENCE_S, run
from tests.http.asgi import Connection, scope, turns
from tests.http.in_process import app_of, ask

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
