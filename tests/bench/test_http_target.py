"""What bench measures over HTTP and over the engine's wire."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import AsyncIterator
from typing import Any, cast

import msgspec
import pytest

from nanocore.bench.http_target import open_server, shares
from nanocore.bench.load import BenchRequest, Outcome
from nanocore.bench.sse import EventReader, chunk_of
from nanocore.bench.targets import (
    PATHS,
    Destination,
    DraftCounts,
    EngineTarget,
    OpenTarget,
    RequestFields,
)
from nanocore.client import AsyncEngineClient, EngineDeadError, SamplingParams
from nanocore.client.requests.progress import Progress
from nanocore.client.requests.request_outputs import CompletionOutput, RequestOutput
from nanocore.protocol.errors import ConfigError
from nanocore.protocol.messages import FinishReason
from nanocore.protocol.metrics import Stats
from tests.bench.conftest import DEMO_MODEL
from tests.bench.fake_server import DONE, FakeServer, chat, completion, event, serving
from tests.protocol.samples import STATS

STREAM = b': hello\n\ndata: {"a": 1}\n\nevent: x\nid: 3\ndata:two\ndata: lines\n\ndata: [DONE]\n\n'
EVENTS = [b'{"a": 1}', b"two\nlines", b"[DONE]"]


@pytest.mark.parametrize("line_end", [b"\n", b"\r\n"])
def test_events_are_the_same_however_the_bytes_come(line_end: bytes) -> None:
    stream = STREAM.replace(b"\n", line_end)
    for size in range(1, len(stream) + 1):
        reader = EventReader()
        parts = [stream[i : i + size] for i in range(0, len(stream), size)]
        assert [event for part in parts for event in reader.feed(part)] == EVENTS


def test_an_event_that_is_not_whole_is_kept_back() -> None:
    reader = EventReader()
    assert reader.feed(b"data: x\n") == []
    assert reader.feed(b"\n") == [b"x"]


@pytest.mark.parametrize(
    ("choice", "has_tokens", "text"),
    [
        ('{"text": " a"}', True, " a"),
        ('{"text": ""}', True, ""),
        ('{"text": "", "finish_reason": "stop"}', False, ""),
        ('{"text": "b", "finish_reason": "length"}', True, "b"),
        ('{"delta": {"role": "assistant", "content": ""}}', False, ""),
        ('{"delta": {"role": "assistant", "content": "c"}}', True, "c"),
        ('{"delta": {"reasoning_content": "d"}}', True, "d"),
        ('{"delta": {"reasoning": "e", "reasoning_content": "e"}}', True, "e"),
        ('{"delta": {"content": null}}', True, ""),
        ('{"delta": {"tool_calls": [{"index": 0}]}, "finish_reason": "tool_calls"}', True, ""),
        ('{"delta": {}, "finish_reason": "stop"}', False, ""),
    ],
)
def test_a_chunk_brings_tokens_unless_it_is_a_role_or_an_end(
    choice: str, has_tokens: bool, text: str
) -> None:
    (found,) = chunk_of(f'{{"id": "x", "choices": [{choice}]}}'.encode()).choices
    assert (found.has_tokens, found.added_text) == (has_tokens, text)


def test_a_chunk_that_is_no_utf_8_is_one_and_one_without_end_is_none() -> None:
    (found,) = chunk_of(b'{"choices": [{"text": "a\xff"}]}').choices
    assert found.text == "a\ufffd"
    with pytest.raises(msgspec.MsgspecError, match="too deeply"):
        chunk_of(b'{"error": ' + b"[" * 100_000)


TEXT = BenchRequest("hello", 1, 6)


def send(
    server: FakeServer, request: BenchRequest = TEXT, backend: str = "openai", **asked: Any
) -> Outcome:
    async def one() -> Outcome:
        async with open_server(destination(server, backend), RequestFields(**asked), 0) as found:
            return await found.send(request, "id-7", 1.0)

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
            return await found.send(TEXT, "", 1.0)

    with serving(lambda body: (200, [])) as server:
        pass
    assert "ClientConnectorError" in asyncio.run(one()).error


def test_without_usage_the_tokenizer_counts_else_the_chunks() -> None:
    pieces = completion(["1 + 2", " = ", "3"], num_prompt_tokens=None)

    async def one(tokenizer: str | None) -> Outcome:
        where = destination(server, tokenizer=tokenizer)
        async with open_server(where, RequestFields(), 0) as found:
            return await found.send(TEXT, "", 1.0)

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


def test_the_tokenizer_may_be_in_a_gguf_file() -> None:
    path = "tests/fixtures/checkpoints/qwen3-q8_0.gguf"
    with serving(lambda body: (200, [])) as server:
        found = found_target(destination(server, tokenizer=path))
        with pytest.raises(ConfigError, match=r"--tokenizer none\.gguf: none\.gguf is missing"):
            found_target(destination(server, tokenizer="none.gguf"))
    assert found.tokenizer_id == path
    assert found.source.tokenizer is not None


def metrics(prefix: str, num_drafts: float, accepted: list[float], engine: int = 0) -> str:
    """As vLLM tells them."""
    labels = f'engine="{engine}",model_name="org/a model"'
    name = f"{prefix}:spec_decode_num"
    return "".join([
        f"# HELP {name}_drafts_total Number of spec decoding drafts.\n",
        f"# TYPE {name}_drafts_total counter\n",
        f"{name}_drafts_total{{{labels}}} {num_drafts}\n",
        f"{name}_drafts_created{{{labels}}} 1.75e+09\n",
        f"{name}_draft_tokens_total{{{labels}}} {num_drafts * len(accepted)}\n",
        f"{name}_accepted_tokens_total{{{labels}}} {sum(accepted)}\n",
        *(f'{name}_accepted_tokens_per_pos_total{{{labels},position="{i}"}} {num}\n'
          for i, num in enumerate(accepted)),
        f"{prefix}:generation_tokens_total{{{labels}}} 7.0\n",
    ])  # fmt: skip


def read_drafts(text: str | None, **more: Any) -> DraftCounts:
    async def read(server: FakeServer) -> DraftCounts:
        async with open_server(destination(server), RequestFields(), 0) as found:
            if more:
                server.location = more["location"]
            return await found.draft_counts()

    with serving(lambda body: (200, [])) as server:
        server.metrics = [] if text is None else [text]
        return asyncio.run(read(server))


@pytest.mark.parametrize("prefix", ["vllm", "nanocore"])
def test_counters_of_drafts_are_read_and_those_of_several_engines_added(prefix: str) -> None:
    one, other = metrics(prefix, 8.0, [6.0, 2.0]), metrics(prefix, 1e6, [5e5], engine=1)
    assert read_drafts(one) == {
        "num_drafts": 8, "num_draft_tokens": 16, "num_accepted_tokens": 8, "0": 6, "1": 2,
    }  # fmt: skip
    both = read_drafts(one + other)
    assert (both["num_drafts"], both["0"], both["1"]) == (1_000_008, 500_006, 2)


@pytest.mark.parametrize(
    "text",
    [None, "", "vllm:generation_tokens_total 7.0\n", '{"data": []}'],
)
def test_a_server_without_these_counters_has_none(text: str | None) -> None:
    assert read_drafts(text) == {}


@pytest.mark.parametrize("value", ["NaN", "+Inf", "1e999", "many", "1.2.3"])
def test_numbers_that_are_none_are_not_counted(value: str) -> None:
    assert read_drafts(f"vllm:spec_decode_num_drafts_total {value}\n") == {}


def test_counters_of_another_host_are_not_read() -> None:
    assert read_drafts(None, location="http://other.example/metrics") == {}


def test_what_cannot_be_opened_is_said() -> None:
    with serving(lambda body: (200, [])) as server:
        with pytest.raises(ConfigError, match="/v1/x does not fit --backend openai"):
            found_target(destination(server, path="/v1/x"))
        with pytest.raises(ConfigError, match="does not fit --backend openai"):
            found_target(destination(server, path=PATHS["openai-chat"]))
        with pytest.raises(ConfigError, match="--tokenizer /nowhere"):
            found_target(destination(server, tokenizer="/nowhere"))
        server.models_status = 401
        with pytest.raises(
            EngineDeadError, match=r"/v1/models: HTTP 401 \(set the key in OPENAI_API_KEY\)"
        ):
            found_target(destination(server))
    with pytest.raises(
        EngineDeadError, match=r"^no server answers at http://.*`nanocore serve MODEL`"
    ):
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
            return await found.send(TEXT, "", 1.0)

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
            return await found.send(TEXT, "", 1.0)

    with serving(lambda body: (200, completion(["a"]))) as server:
        server.location = "/v1/elsewhere"
        assert asyncio.run(one()).text == "a"
    assert [path for path, _, _ in server.requests] == ["/v1/completions", "/v1/elsewhere"]


TOKEN_IDS = [5, 6, 7, 8]


class ScriptedClient:
    """Streams outputs of so many tokens in all, and then ends, or fails."""

    def __init__(
        self, counts: list[int], reason: FinishReason | None, message: str | None = None
    ) -> None:
        self._counts, self._reason, self._message = counts, reason, message
        self.asked: list[tuple[object, SamplingParams, str]] = []

    async def generate(
        self, prompt: object, params: SamplingParams, request_id: str
    ) -> AsyncIterator[RequestOutput]:
        self.asked.append((prompt, params, request_id))
        for place, count in enumerate(self._counts, 1):
            is_last = place == len(self._counts)
            reason = self._reason if is_last else None
            sample = CompletionOutput([], 0, TOKEN_IDS, count, "", reason, None, self._message)
            yield RequestOutput(request_id, None, [1], [sample], is_last, 0, Progress(1))
        if self._reason is None:
            raise EngineDeadError("it is gone")

    async def stats(self) -> Stats:
        if self._reason is None:
            raise EngineDeadError("it is gone")
        return msgspec.structs.replace(
            STATS,
            spec_decode_num_drafts=3,
            spec_decode_num_draft_tokens=8,
            spec_decode_num_accepted_tokens=5,
            spec_decode_num_accepted_tokens_per_pos=[3, 2, 0],
        )


def sent(client: ScriptedClient) -> Outcome:
    target = EngineTarget(cast("AsyncEngineClient", client), SamplingParams(temperature=0))
    return asyncio.run(target.send(BenchRequest(array("i", [1, 2]), 2, 9), "id-1", 3.0))


def test_each_output_with_new_tokens_is_an_arrival() -> None:
    client = ScriptedClient([1, 3, 3, 4, 4], "length")
    outcome = sent(client)
    assert outcome.error == ""
    assert outcome.chunk_tokens == [1, 2, 1]
    assert (outcome.num_prompt_tokens, outcome.num_output_tokens) == (2, 4)
    assert outcome.token_ids == TOKEN_IDS
    assert outcome.start_s <= outcome.chunk_times_s[0] <= outcome.chunk_times_s[-1] <= outcome.end_s
    ((prompt, params, request_id),) = client.asked
    assert (prompt, params.max_tokens, params.temperature, request_id) == (
        array("i", [1, 2]), 9, 0, "id-1",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("counts", "reason", "message", "error"),
    [
        ([1], None, None, "EngineDeadError: it is gone"),
        ([1], "error", "no memory", "error: no memory"),
        ([1], "timeout", None, "timeout: ended by the engine"),
        ([0], "stop", None, "no token came"),
    ],
)
def test_what_does_not_end_by_itself_has_failed(
    counts: list[int], reason: FinishReason | None, message: str | None, error: str
) -> None:
    assert sent(ScriptedClient(counts, reason, message)).error == error


@pytest.mark.parametrize(
    ("reason", "counts"),
    [
        ("stop", {"num_drafts": 3, "num_draft_tokens": 8, "num_accepted_tokens": 5}
         | {"0": 3, "1": 2, "2": 0}),
        (None, {}),
    ],
)  # fmt: skip
def test_an_engine_tells_its_counters_of_drafts_unless_it_is_gone(
    reason: FinishReason | None, counts: dict[str, int]
) -> None:
    client = cast("AsyncEngineClient", ScriptedClient([], reason))
    assert asyncio.run(EngineTarget(client, SamplingParams()).draft_counts()) == counts
