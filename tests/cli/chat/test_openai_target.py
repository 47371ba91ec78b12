"""A server's chunks become events, and its refusals lines that say what to do."""

from __future__ import annotations

import asyncio
import json
import shutil
import socket
import ssl
import subprocess
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest

from nanocore.cli.chat.openai_target import OpenAIChatTarget
from nanocore.client.chat.events import AnswerCollector, ChatAnswer, Started, Text, ToolCall, Usage
from nanocore.protocol.errors import (
    ConfigError,
    EngineDeadError,
    EngineOverloadedError,
    InvalidRequestError,
    NanocoreError,
)
from tests.bench.fake_server import DONE, FakeServer, Script, chat, event, serving

QUESTION = [
    {"role": "user", "content": "x"},
    {"role": "assistant", "content": "y", "reasoning_content": "hm"},
    {"role": "user", "content": "z"},
]


ERROR = b'{"error": {"message": "so\\nnot", "code": 1}}'


def answering(*pieces: bytes, status: int = 200) -> Script:
    return lambda body: (status, pieces)


def delta(reason: str | None = None, **fields: Any) -> bytes:
    return event({"choices": [{"index": 0, "delta": fields, "finish_reason": reason}]})


@asynccontextmanager
async def opened(server: FakeServer, **arguments: Any) -> AsyncIterator[OpenAIChatTarget]:
    arguments = {"api_key": None, "model": None} | arguments
    target = OpenAIChatTarget(f"{server.url}/v1", **arguments)
    try:
        await target.open()
        yield target
    finally:
        await target.close()


async def collected(target: OpenAIChatTarget, **sampling: Any) -> ChatAnswer:
    collector, is_first = AnswerCollector(), True
    async for one in target.ask(QUESTION, sampling):
        assert isinstance(one, Started) == is_first
        is_first = False
        collector.add(one)  # type: ignore[arg-type]
    (answer,) = collector.answers()
    return answer


def ask(script: Script, **arguments: Any) -> tuple[ChatAnswer, FakeServer]:
    async def run() -> ChatAnswer:
        async with opened(server, **arguments) as target:
            return await collected(target, seed=3)

    with serving(script) as server:
        return asyncio.run(run()), server


def test_a_refusal_has_the_servers_reason() -> None:
    lacks = b'{"error": {"message": "no template", "param": "chat_template"}}'
    with pytest.raises(InvalidRequestError, match="no template"):
        ask(answering(lacks, status=400))


@pytest.mark.parametrize(
    "listed", [{}, {"default_sampling": {}}, {"default_sampling": {"top_k": 9}}]
)
def test_what_a_model_recommends_is_listed(listed: dict[str, Any]) -> None:
    async def run() -> Any:
        async with opened(server) as target:
            return target.default_sampling

    with serving(answering()) as server:
        server.model = listed
        assert asyncio.run(run()) == listed.get("default_sampling")


def test_a_question_is_sent_as_openais_api_has_it() -> None:
    answer, server = ask(answering(*chat(["a", " b"])), api_key="secret")
    assert (answer.content, answer.finish_reason) == ("a b", "stop")
    assert answer.usage == Usage(7, 0, 2, 0)
    ((path, headers, body),) = server.requests
    assert (path, headers["authorization"]) == ("/v1/chat/completions", "Bearer secret")
    assert body == {
        "model": "fake",
        "messages": [
            {"role": "user", "content": "x"},
            {"role": "assistant", "content": "y"},
            {"role": "user", "content": "z"},
        ],
        "stream": True,
        "stream_options": {"include_usage": True},
        "seed": 3,
    }


def test_reasoning_calls_and_cached_tokens_are_told() -> None:
    details = {"cached_tokens": 4}
    answer, _ = ask(
        answering(
            delta(role="assistant", content=""),
            delta(reasoning="so ", content=None),
            delta(reasoning_content="what"),
            delta(tool_calls=[{"index": 0, "id": "c1", "function": {"name": "f"}}]),
            delta(tool_calls=[{"index": 0, "function": {"arguments": "{}"}}]),
            delta(tool_calls=[{"index": 2, "function": {"name": "g", "arguments": "1"}}]),
            delta("tool_calls"),
            event({"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 3,
                "prompt_tokens_details": details}}),
            DONE,
        )
    )  # fmt: skip
    assert answer.reasoning == "so what"
    assert answer.tool_calls == [ToolCall("c1", "f", "{}"), ToolCall("call_1", "g", "1")]
    assert (answer.finish_reason, answer.usage) == ("tool_calls", Usage(9, 4, 3, 0))


def test_reasons_of_other_servers_are_an_end_and_so_is_done_but_perhaps_too_early() -> None:
    answer, _ = ask(answering(delta(content="a"), delta("eos"), DONE))
    assert (answer.finish_reason, answer.message) == ("stop", None)
    answer, _ = ask(answering(delta(content="a"), DONE))
    assert (answer.finish_reason, answer.message is not None) == ("stop", True)


def raw(text: str) -> bytes:
    return f"data: {text}\n\n".encode("latin-1")


@pytest.mark.parametrize(
    ("pieces", "content"),
    [
        ([raw('{"choices": [{"delta": {"content": "a\xff\xfe\xc3(b"}}]}')],
         "a\ufffd\ufffd\ufffd(b"),
        ([delta(content="x\ud83d")], "x?"),
        ([raw('{"choices": null}'), raw('{"choices": [null]}'),
          raw('{"choices": [{"delta": null}]}'),
          raw("3"), raw('{"usage": {"prompt_tokens": "x"}}'), delta(content=5),
          delta(content="a", tool_calls=3, reasoning=[])], "a"),
        ([event({"usage": {"prompt_tokens_details": 1}, "choices": [{"finish_reason": 3,
          "delta": {"content": "a"}}]})], "a"),
    ],
    ids=["no UTF-8", "half a pair", "odd", "numbers"],
)  # fmt: skip
def test_what_is_odd_costs_nothing_but_itself(pieces: list[bytes], content: str) -> None:
    answer, _ = ask(answering(*pieces, delta("stop"), DONE))
    assert (answer.content, answer.finish_reason) == (content, "stop")


@pytest.mark.parametrize(
    "content",
    ["all\nof it", [{"type": "text", "text": "all\n"}, {"type": "text", "text": "of it"}]],
)
def test_an_answer_that_comes_whole_is_one(content: str | list[dict[str, str]]) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    message = {"role": "assistant", "content": content, "tool_calls": [call]}
    whole = {
        "choices": [{"index": 0, "message": message, "finish_reason": "tool_calls"}],
        "usage": {"prompt_tokens": 3, "completion_tokens": 2},
    }
    body = json.dumps(whole, indent=2).encode()
    answer, _ = ask(answering(body[:20], body[20:]))
    assert (answer.content, answer.usage) == ("all\nof it", Usage(3, 0, 2, 0))
    assert (answer.tool_calls, answer.finish_reason) == ([ToolCall("c", "f", "{}")], "tool_calls")


def test_a_url_that_says_who_asks_is_not_shown_and_neither_is_its_user() -> None:
    async def run(url: str) -> None:
        target = OpenAIChatTarget(url, None, "m")
        try:
            await target.open()
            await collected(target)
        finally:
            await target.close()

    said = b'{"error": "no amy-user:hunter22 YW15LXVzZXI6aHVudGVyMjI="}'
    with serving(answering(said, status=403)) as server:
        url = server.url.replace("http://", "http://amy-user:hunter22@") + "/v1"
        hidden = rf"^{server.url}/v1: HTTP 403: no \*\*\*:\*\*\* \*\*\* \("
        with pytest.raises(ConfigError, match=hidden):
            asyncio.run(run(url))
    (request,) = server.requests
    assert request[1]["authorization"] == "Basic YW15LXVzZXI6aHVudGVyMjI="


@pytest.mark.parametrize(
    ("status", "body", "kind", "words"),
    [
        (401, ERROR, ConfigError, r"HTTP 401: so not \(set the key by --api-key or OPENAI_API_KEY"),
        (400, ERROR, InvalidRequestError, "HTTP 400: so not$"),
        (422, b'{"detail": [1]}', InvalidRequestError, "detail"),
        (429, b'{"message": "busy"}', EngineOverloadedError, "HTTP 429: busy"),
        (503, b"", EngineOverloadedError, r"HTTP 503: \(no reason\)"),
        (500, b"<html>" * 500, NanocoreError, r"\(3000 characters\)"),
        (200, delta(content="a"), EngineDeadError, "lost during the response"),
        (200, b"", EngineDeadError, "lost during the response"),
        (200, b"data: {", EngineDeadError, "lost during the response"),
        (200, b"data: {\n\n", NanocoreError, "invalid chunk"),
        (200, b"data: " + b"[" * 200_000 + b"\n\n", NanocoreError, "invalid chunk.*too deeply"),
        (200, DONE, NanocoreError, "the response is empty"),
        (200, ERROR, NanocoreError, "error: so not"),
        (200, b"<html>\nLog in", NanocoreError, "not a response of OpenAI's API: <html> Log in"),
        (200, b'{"choices": []}', NanocoreError, "not a response of OpenAI's API"),
        (200, delta(content="a") + event({"object": "error", "message": "old", "code": 400}),
         NanocoreError, "error: old$"),
        (401, b"no sesame-key", ConfigError, r"HTTP 401: no \*\*\* \("),
        (200, event({"error": "not sesame-key"}), NanocoreError, r"error: not \*\*\*$"),
        (200, delta(content="a") + b"data: " + ERROR + b"\n\n", NanocoreError, "error: so not"),
    ],
)  # fmt: skip
def test_what_goes_wrong_is_a_line(
    status: int, body: bytes, kind: type[Exception], words: str
) -> None:
    with pytest.raises(kind, match=words) as caught:
        ask(answering(body, status=status), model="m", api_key="sesame-key")
    assert "\n" not in str(caught.value)


def test_leaving_an_answer_closes_its_connection() -> None:
    closed = Event()

    def endless(body: dict[str, Any]) -> tuple[int, Any]:
        def pieces() -> Iterator[bytes]:
            try:
                while True:
                    yield delta(content="a")
            except GeneratorExit:
                closed.set()

        return 200, pieces()

    async def run() -> None:
        async with opened(server) as target, aclosing(target.ask(QUESTION, {})) as events:
            async for one in events:
                if isinstance(one, Text):
                    break
            await events.aclose()
            assert await asyncio.to_thread(closed.wait, 30)

    with serving(endless) as server:
        asyncio.run(run())


def opening(url: str) -> None:
    async def run() -> None:
        target = OpenAIChatTarget(url, None, None)
        try:
            await target.open()
        finally:
            await target.close()

    asyncio.run(run())


def test_a_server_that_says_nothing_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nanocore.cli.chat.openai_target.CONNECT_TIMEOUT_S", 0.05)
    with (
        socket.create_server(("127.0.0.1", 0)) as silent,
        pytest.raises(EngineDeadError, match="cannot reach a server at"),
    ):
        opening(f"http://127.0.0.1:{silent.getsockname()[1]}/v1")


def test_models_are_listed_and_chosen() -> None:
    async def run() -> Sequence[str]:
        async with opened(server) as target:
            with pytest.raises(InvalidRequestError, match=r"unknown model .none.; .* fake"):
                await target.switch("none")
            await target.switch("fake")
            assert target.max_model_len is None
            return await target.models()

    with serving(answering()) as server:
        assert asyncio.run(run()) == ["fake"]


def test_a_server_that_lists_no_models_needs_a_name() -> None:
    async def run(model: str | None) -> str:
        async with opened(server, model=model) as target:
            return target.model

    with serving(answering()) as server:
        server.models_status = 404
        assert asyncio.run(run("mine")) == "mine"
        with pytest.raises(ConfigError, match=r"HTTP 404.*name one with --model-name"):
            asyncio.run(run(None))
        server.models_status = 401
        with pytest.raises(ConfigError, match="set the key by --api-key"):
            asyncio.run(run("mine"))


def test_a_server_that_is_not_there_is_said_to_be_missing() -> None:
    with serving(answering()) as server:
        pass
    with pytest.raises(EngineDeadError, match=f"a server at {server.url}/v1.*: Connection ref"):
        opening(f"{server.url}/v1")


def test_a_host_without_an_address_is_said_to_be_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_: object, **__: object) -> None:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    with pytest.raises(EngineDeadError, match=r"a server at .*: Name or service not known"):
        opening("http://nobody.invalid/v1")


def self_signed(path: Path) -> Path:
    """A certificate of 127.0.0.1, with its key."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("the openssl command makes the certificate")
    subprocess.run(
        [openssl, "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1",
         "-nodes", "-days", "2", "-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1",
         "-keyout", str(path), "-out", str(path)],
        check=True, capture_output=True,
    )  # fmt: skip
    return path


@pytest.mark.parametrize(
    ("speaks_tls", "words"),
    [
        (True, r"its certificate is not trusted: self-signed certificate \(SSL_CERT_FILE names"),
        (False, "TLS fails: "),
    ],
)
def test_what_is_wrong_with_tls_is_said(speaks_tls: bool, words: str, tmp_path: Path) -> None:
    class Quiet(HTTPServer):
        def handle_error(self, *_: object) -> None: ...

    with Quiet(("127.0.0.1", 0), BaseHTTPRequestHandler) as server:
        if speaks_tls:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(self_signed(tmp_path / "both.pem"))
            server.socket = context.wrap_socket(server.socket, server_side=True)
        server.timeout = 30
        thread = Thread(target=server.handle_request)
        thread.start()
        with pytest.raises(ConfigError, match=words):
            opening(f"https://127.0.0.1:{server.server_port}/v1")
        thread.join()


def test_a_server_that_redirects_without_end_is_named() -> None:
    async def run() -> None:
        async with opened(server, model="fake") as target:
            server.location = f"{server.url}/v1/models"
            with pytest.raises(ConfigError, match="redirects without end"):
                await target.models()

    with serving(answering()) as server:
        asyncio.run(run())


def test_a_redirect_to_another_host_is_refused_with_both_names_and_without_the_key() -> None:
    async def run() -> tuple[str, str]:
        async with opened(server, model="fake", api_key="secret-key") as target:
            server.location = f"{other.url}/secret-key"
            errors = []
            for refused in (target.models(), collected(target)):
                with pytest.raises(ConfigError) as raised:
                    await refused
                errors.append(str(raised.value))
            return errors[0], errors[1]

    with serving(answering(*chat(["a"]))) as other, serving(answering()) as server:
        for error in asyncio.run(run()):
            assert error.startswith(f"{server.url} redirects to {other.url}, which is not followed")
            assert "secret-key" not in error
    assert not other.requests
