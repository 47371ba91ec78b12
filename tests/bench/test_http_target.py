"""What is sent to a server, and what its events come to."""

from __future__ import annotations

import asyncio
from array import array
from typing import Any

import pytest

from nanocore.bench.http_target import open_server, shares
from nanocore.bench.load import BenchRequest, Outcome
from nanocore.bench.targets import PATHS, Destination, OpenTarget, RequestFields
from nanocore.protocol.errors import ConfigError, EngineDeadError
from tests.bench.conftest import DEMO_MODEL
from tests.bench.fake_server import DONE, FakeServer, chat, completion, event, serving

TEXT = BenchRequest("hello", 1, 6)


def send(
    server: FakeServer, request: BenchRequest = TEXT, backend: str = "openai", **asked: Any
) -> Outcome:
    async def one() -> Outcome:
        async with open_server(destination(server, backend), RequestFields(**asked), 0) as found:
            return await found.target.send(request, "id-7", arrival_s=1.0)

    return asyncio.run(one())


def destination(server: FakeServer, backend: str = "openai", **fields: Any) -> Destination:
    fields = {"path": PATHS[backend], "headers": {"x-mine": "yes"}, **fields}
    return Destination(backend=backend, base_url=server.url, **fields)


def found_target(where: Destination) -> OpenTarget:
    async def see() -> OpenTarget:
        async with open_server(where, RequestFields(), 0) as found:
            return found

    return asyncio.run(see())


def test_a_completion_is_counted_as_the_server_counts() -> None:
    with serving(lambda body: (200, completion(["a", "b", "c"]))) as server:
        outcome = send(server, ignore_eos=True, sampling={"top_k": 3}, extra_body={"user": "me"})
    assert outcome.error == ""
    assert (outcome.num_prompt_tokens, outcome.num_output_tokens) == (5, 6)
    assert outcome.text == "abc"
    assert outcome.chunk_tokens == [2, 2, 2]
    assert outcome.start_s <= outcome.chunk_times_s[0] <= outcome.end_s
    ((path, headers, body),) = server.requests
    assert path == "/v1/completions"
    assert (headers["x-mine"], headers["x-request-id"]) == ("yes", "id-7")
    assert body == {
        "model": "fake", "prompt": "hello", "max_tokens": 6, "stream": True,
        "stream_options": {"include_usage": True}, "ignore_eos": True, "top_k": 3, "user": "me",
    }  # fmt: skip


def test_prompts_of_token_ids_are_sent_as_such() -> None:
    with serving(lambda body: (200, completion(["a"]))) as server:
        send(server, BenchRequest(array("i", [4, 5]), 2, 1))
    assert server.requests[0][2]["prompt"] == [4, 5]


def test_a_chats_role_and_end_are_no_tokens() -> None:
    with serving(lambda body: (200, chat(["x", "y"]))) as server:
        outcome = send(server, backend="openai-chat", logprobs=2)
    assert (outcome.num_prompt_tokens, outcome.num_output_tokens) == (7, 2)
    assert (len(outcome.chunk_times_s), outcome.text) == (2, "xy")
    path, _, body = server.requests[0]
    assert path == "/v1/chat/completions"
    assert body["messages"] == [{"role": "user", "content": "hello"}]
    assert (body["max_completion_tokens"], body["logprobs"], body["top_logprobs"]) == (6, True, 2)


@pytest.mark.parametrize(
    ("status", "pieces", "error"),
    [
        (500, [b"it\nbroke"], "HTTP 500: it broke"),
        (429, [b""], "HTTP 429: "),
        (200, [DONE], "no token came"),
        (200, completion(["a", "b"])[:1], "the stream ended early"),
        (200, [*completion(["a"])[:1], event({"error": {"message": "oh"}})], "error: {'message'"),
        (500, [b"x" * 2**21], "HTTP 500: xxx"),
        (200, [b"data: " + b"x" * 2**22, b"x"], "DecodeError: an event has more than 4 MiB"),
        (200, [b"data: x\n" * 2**20], "DecodeError: an event has more than 4 MiB"),
        (200, [b"data: nonsense\n\n"], "DecodeError"),
        (200, [b'data: {"choices": 3}\n\n'], "ValidationError"),
    ],
)
def test_what_fails_is_said_and_ends_nothing_else(
    status: int, pieces: list[bytes], error: str
) -> None:
    with serving(lambda body: (status, pieces)) as server:
        found = send(server).error
    assert error in found
    assert len(found) < 2000


def test_a_server_that_is_gone_is_an_error_of_the_request() -> None:
    async def one() -> Outcome:
        where = destination(server, model="fake")
        async with open_server(where, RequestFields(), 0) as found:
            return await found.target.send(TEXT, "", 1.0)

    with serving(lambda body: (200, [])) as server:
        pass
    assert "ClientConnectorError" in asyncio.run(one()).error


def test_without_usage_the_tokenizer_counts_else_the_chunks() -> None:
    pieces = completion(["1 + 2", " = ", "3"], num_prompt_tokens=None)

    async def one(tokenizer: str | None) -> Outcome:
        where = destination(server, tokenizer=tokenizer)
        async with open_server(where, RequestFields(), 0) as found:
            return await found.target.send(TEXT, "", 1.0)

    with serving(lambda body: (200, pieces)) as server:
        by_chunks = asyncio.run(one(None))
        by_tokenizer = asyncio.run(one(str(DEMO_MODEL / "tokenizer.json")))
    assert (by_chunks.num_prompt_tokens, by_chunks.num_output_tokens) == (1, 3)
    assert by_tokenizer.num_output_tokens > 3


def test_the_model_and_the_tokenizer_are_found() -> None:
    with serving(lambda body: (200, [])) as server:
        found = found_target(destination(server))
        assert (found.model_id, found.tokenizer_id, found.source.tokenizer) == (
            "a/fake",
            None,
            None,
        )
        folder = str(DEMO_MODEL)
        found = found_target(destination(server, model="name", model_id=folder))
        assert (found.model_id, found.tokenizer_id) == (folder, folder)
        assert found.source.tokenizer is not None


def test_the_tokenizer_may_be_that_of_an_engine(demo_endpoint: str) -> None:
    with serving(lambda body: (200, [])) as server:
        found = found_target(destination(server, engine_endpoint=demo_endpoint))
    assert found.tokenizer_id == str(DEMO_MODEL)
    assert found.source.tokenizer is not None
    assert found.model_id == "a/fake"


def test_what_cannot_be_opened_is_said() -> None:
    with serving(lambda body: (200, [])) as server:
        with pytest.raises(ConfigError, match="/v1/x does not fit --backend openai"):
            found_target(destination(server, path="/v1/x"))
        with pytest.raises(ConfigError, match="does not fit --backend openai"):
            found_target(destination(server, path=PATHS["openai-chat"]))
        with pytest.raises(ConfigError, match="--tokenizer /nowhere"):
            found_target(destination(server, tokenizer="/nowhere"))
        server.models_status = 401
        with pytest.raises(EngineDeadError, match="/v1/models: HTTP 401"):
            found_target(destination(server))
    with pytest.raises(EngineDeadError, match="/v1/models: ClientConnectorError"):
        found_target(destination(server))


def test_shares_are_even() -> None:
    assert [shares(7, 3), shares(2, 3), shares(6, 2), shares(0, 1)] == [
        [3, 2, 2],
        [1, 1, 0],
        [3, 3],
        [0],
    ]
    assert shares(0, 0) == []


@pytest.mark.parametrize("location", ["{other}/v1/completions", "ftp://[", "mailto:me"])
def test_a_redirect_to_another_host_is_an_error_and_nothing_is_sent_there(location: str) -> None:
    async def one() -> Outcome:
        where = destination(server, model="fake")
        async with open_server(where, RequestFields(), 0) as found:
            return await found.target.send(TEXT, "", 1.0)

    with serving(lambda body: (200, [])) as other, serving(lambda body: (200, [])) as server:
        server.location = location.format(other=other.url)
        error = asyncio.run(one()).error
        with pytest.raises(ConfigError, match=f"{server.url} redirects to .* not followed"):
            found_target(destination(server))
    assert f"{server.url} redirects to " in error
    assert not other.requests
    if "{" in location:
        assert f"redirects to {other.url}, which is not followed" in error
        assert "use that URL" in error


def test_a_redirect_within_a_host_is_followed() -> None:
    async def one() -> Outcome:
        async with open_server(destination(server, model="fake"), RequestFields(), 0) as found:
            return await found.target.send(TEXT, "", 1.0)

    with serving(lambda body: (200, completion(["a"]))) as server:
        server.location = "/v1/elsewhere"
        assert asyncio.run(one()).text == "a"
    assert [path for path, _, _ in server.requests] == ["/v1/completions", "/v1/elsewhere"]
