"""Requests that lose their engine and go on with another: what the next engine is sent."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from nanocore.client import (
    AsyncEngineClient,
    ClientStateError,
    EngineDeadError,
    RequestOutput,
    SamplingParams,
)
from nanocore.protocol.codec import unpack_int32
from nanocore.protocol.errors import EngineDrainingError
from nanocore.protocol.messages import (
    Accepted,
    Bye,
    Draining,
    Error,
    Event,
    Ping,
    Pong,
    Submit,
    Welcome,
)
from tests.client.fake_engine import NO_TEXT, FakeEngine, until_lost, welcome_message
from tests.client.running import PATIENCE_S

FINGERPRINT = "f" * 32


@pytest.fixture(autouse=True)
def _no_timeouts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nanocore.client.connection.engine_connection.ENGINE_TIMEOUT_S", 1000.0)


def _welcome(number: int, fingerprint: str | None = FINGERPRINT, **model: Any) -> Welcome:
    welcome = welcome_message()
    card = replace(welcome.model, numerics_fingerprint=fingerprint, **model)
    capabilities = [*welcome.capabilities, "embeddings"]
    return replace(welcome, engine_instance=f"{number:032x}", model=card, capabilities=capabilities)


@asynccontextmanager
async def _connected(
    *endpoints: str, **options: Any
) -> AsyncIterator[tuple[FakeEngine, AsyncEngineClient]]:
    options = {"timeout_s": PATIENCE_S, "resume_timeout_s": PATIENCE_S, **options}
    engine = FakeEngine(endpoints[0])
    try:
        welcoming = asyncio.create_task(engine.welcome(_welcome(0)))
        async with AsyncEngineClient.connect([*endpoints], **options) as client:
            await welcoming
            yield engine, client
    finally:
        engine.close()


@asynccontextmanager
async def _next(endpoint: str, welcome: Welcome) -> AsyncIterator[FakeEngine]:
    engine = FakeEngine(endpoint)
    try:
        await engine.welcome(welcome)
        yield engine
    finally:
        engine.close()


def _begin(
    client: AsyncEngineClient, request_id: str = "r", **fields: Any
) -> asyncio.Task[RequestOutput]:
    timeout_s = fields.pop("timeout_s", None)
    params = SamplingParams(detokenize=False, **fields)
    return asyncio.create_task(
        client.complete([1, 2], params, request_id, timeout_s=timeout_s), name=request_id
    )


async def _until_heard(engine: FakeEngine, client: AsyncEngineClient) -> None:
    """All that this engine has said has been taken in."""
    call = asyncio.create_task(client.health())
    ping = await engine.receive(Ping)
    engine.send(Pong(nonce=ping.nonce))
    await call


async def _lose(
    engine: FakeEngine, client: AsyncEngineClient, tokens: dict[int, list[int]], *events: Event
) -> None:
    """Let an engine die once the client has heard of these tokens."""
    engine.output(tokens, *events)
    await _until_heard(engine, client)
    engine.close()


def _tokens(submit: Submit) -> list[int]:
    return list(unpack_int32(submit.output_token_ids))


async def test_the_next_engine_gets_the_prompt_the_seed_and_the_tokens_so_far(
    endpoint: str,
) -> None:
    async with _connected(endpoint) as (old, client):
        request = _begin(client, max_tokens=3, presence_penalty=1.0)
        first = await old.receive(Submit)
        old.send(Accepted(request_id="r", handle=7, seed=77))
        await _lose(old, client, {7: [10, 11]}, Event(handle=7, num_cached_tokens=0))
        async with _next(endpoint, _welcome(1)) as new:
            again = await new.accept(3)
            assert first.sampling is not None
            assert again == replace(
                first,
                sampling=replace(first.sampling, seed=77),
                output_token_ids=again.output_token_ids,
            )
            assert _tokens(again) == [10, 11]
            new.output({3: [12]}, Event(handle=3, num_cached_tokens=1, finish_reason="length"))
            output = await request
        assert output.outputs[0].token_ids == [10, 11, 12]
        assert output.num_cached_tokens == 0
        (resume,) = output.resumes
        assert (resume.num_output_tokens, resume.is_exact) == (2, True)
        assert resume.engine_instance == f"{1:032x}"
        assert resume.next_s is not None
        assert resume.lost_s <= resume.reached_s <= resume.next_s


async def test_an_embedding_is_asked_for_again_without_a_seed(endpoint: str) -> None:
    async with _connected(endpoint) as (old, client):
        request = asyncio.create_task(client.embed([1, 2], "mean", request_id="r"))
        first = await old.accept(7)
        await _until_heard(old, client)
        old.close()
        async with _next(endpoint, _welcome(1)) as new:
            assert await new.accept(3) == first
            new.output({}, Event(handle=3, finish_reason="stop", embedding=bytes(8)))
            assert (await request).embedding.tolist() == [0.0, 0.0]


@pytest.mark.parametrize("is_noticed", [True, False])
async def test_a_new_request_waits_for_the_next_engine(endpoint: str, is_noticed: bool) -> None:
    async with _connected(endpoint) as (old, client):
        old.close()
        if is_noticed:
            await until_lost(client)
        request = _begin(client)
        with pytest.raises(EngineDeadError):
            await client.stats()  # which is about an engine, and not to be had
        async with _next(endpoint, _welcome(1)) as new:
            await new.accept(3)
            new.output({3: [12]}, Event(handle=3, finish_reason="length"))
            assert (await request).outputs[0].token_ids == [12]


async def test_what_needs_the_tokenizer_waits_for_the_next_engine(
    endpoint: str, tokenizer_folder: Path
) -> None:
    async with _connected(endpoint, tokenizer=tokenizer_folder) as (old, client):
        old.close()
        await until_lost(client)
        calls = asyncio.gather(
            client.get_tokenizer(), client.encode("a"), client.with_tokenizer(id)
        )
        async with _next(endpoint, _welcome(1)):
            tokenizer, token_ids, number = await calls
            assert token_ids == tokenizer.encode("a")
            assert number == id(tokenizer)


async def test_a_new_request_waits_no_longer_than_its_own_time(endpoint: str) -> None:
    async with _connected(endpoint) as (old, client):
        old.close()
        await until_lost(client)
        with pytest.raises(EngineDeadError, match="within the request's timeout_s"):
            await _begin(client, timeout_s=1e-3)


async def test_what_cannot_be_sent_again_fails_and_keeps_nobody_waiting(
    endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("a defect")

    async with _connected(endpoint) as (old, client):
        requests = [_begin(client, name) for name in "ab"]
        for handle in (1, 2):
            await old.accept(handle)
        monkeypatch.setattr("nanocore.client.connection.resubmission.resubmissions", fail)
        old.close()
        async with _next(endpoint, _welcome(1)):
            for request in requests:
                with pytest.raises(EngineDeadError, match="internal error: RuntimeError"):
                    await request


async def test_each_sample_that_runs_becomes_a_request_with_its_own_seed(endpoint: str) -> None:
    async with _connected(endpoint) as (old, client):
        request = _begin(client, n=3, max_tokens=9)
        await old.receive(Submit)
        old.send(Accepted(request_id="r", handle=7, seed=2**53 - 2))
        await _lose(old, client, {7: [10], 8: [20, 21]}, Event(handle=8, finish_reason="length"))
        async with _next(endpoint, _welcome(1)) as new:
            submits = [await new.accept(1), await new.accept(2)]
            assert [one.request_id for one in submits] == ["r#0", "r#2"]
            assert [_tokens(one) for one in submits] == [[10], []]
            seeds = [one.sampling.seed for one in submits if one.sampling]
            assert seeds == [2**53 - 2, 0], "modulo 2**53"
            assert [one.sampling.n for one in submits if one.sampling] == [1, 1]
            new.output({1: [11], 2: [30]})
            new.finish(1)
            new.finish(2)
            output = await request
        assert [one.token_ids for one in output.outputs] == [[10, 11], [20, 21], [30]]
        assert len(output.resumes) == 1


@pytest.mark.parametrize("accepted", [False, True])
async def test_a_request_without_tokens_is_sent_as_it_was(endpoint: str, accepted: bool) -> None:
    async with _connected(endpoint) as (old, client):
        request = _begin(client, n=2)
        first = await old.receive(Submit)
        if accepted:
            old.send(Accepted(request_id="r", handle=7, seed=5))
            await _until_heard(old, client)
        old.close()
        async with _next(endpoint, _welcome(1)) as new:
            again = await new.accept(1)
            assert first.sampling is not None
            seed = 5 if accepted else None
            assert again == replace(first, sampling=replace(first.sampling, seed=seed))
            new.output({1: [1], 2: [2]})
            new.finish(1)
            new.finish(2)
            assert [one.token_ids for one in (await request).outputs] == [[1], [2]]


async def test_an_engine_that_promises_no_equal_bits_goes_on_and_says_so(
    endpoint: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with _connected(endpoint) as (old, client):
        request = await old.begin(_begin(client))
        await _lose(old, client, {1: [10]})
        async with _next(endpoint, _welcome(1, fingerprint="0" * 32)) as new:
            await new.accept(1)
            new.finish(1)
            (resume,) = (await request).resumes
        assert not resume.is_exact
        assert "may compute other bits" in caplog.text


async def test_an_engine_of_another_model_does_not_go_on(endpoint: str) -> None:
    async with _connected(endpoint) as (old, client):
        request = await old.begin(_begin(client))
        old.close()
        async with _next(endpoint, _welcome(1, vocab_size=17)):
            with pytest.raises(EngineDeadError, match=r"another engine.*vocab_size is 17"):
                await request


async def test_an_engine_before_1_9_goes_on_only_with_what_has_no_tokens(endpoint: str) -> None:
    async with _connected(endpoint) as (old, client):
        has_token = await old.begin(_begin(client, "a"))
        has_none = await old.begin(_begin(client, "b"), 2)
        await _lose(old, client, {1: [10]})
        async with _next(endpoint, replace(_welcome(1), protocol=(1, 8))) as new:
            with pytest.raises(EngineDeadError, match=r"speaks protocol \(1, 8\)"):
                await has_token
            assert (await new.accept(1)).request_id == "b"
            new.finish(1)
            assert (await has_none).finished


async def test_a_session_that_the_engine_has_forgotten_is_replaced(endpoint: str) -> None:
    async with _connected(endpoint) as (engine, client):
        request = await engine.begin(_begin(client))
        engine.output({1: [10]})
        engine.send(Error(code="no_session", message="PONG before HELLO"))
        await engine.welcome(_welcome(0))
        assert _tokens(await engine.accept(2)) == [10]
        engine.finish(2)
        assert (await request).outputs[0].token_ids == [10]


async def test_a_request_that_waits_for_an_engine_can_be_aborted(endpoint: str) -> None:
    async with _connected(endpoint) as (old, client):
        request = await old.begin(_begin(client))
        await _lose(old, client, {1: [10]})
        await until_lost(client)
        await client.abort("r")
        output = await request
        assert (output.outputs[0].finish_reason, output.outputs[0].token_ids) == ("abort", [10])


async def test_a_request_that_is_left_while_it_waits_is_not_sent_again(endpoint: str) -> None:
    async with _connected(endpoint) as (old, client):
        left = await old.begin(_begin(client, "left"))
        kept = await old.begin(_begin(client, "kept"), 2)
        old.close()
        await until_lost(client)
        left.cancel()
        await asyncio.gather(left, return_exceptions=True)
        async with _next(endpoint, _welcome(1)) as new:
            assert (await new.accept(1)).request_id == "kept"
            new.finish(1)
            await kept
            later = _begin(client, "later")
            assert (await new.accept(2)).request_id == "later"
            new.finish(2)
            await later


async def test_the_time_of_a_request_runs_while_it_waits(endpoint: str) -> None:
    async with _connected(endpoint) as (old, client):
        request = _begin(client, timeout_s=0.01)
        assert (await old.accept(1)).timeout_s == 0.01
        old.close()
        assert (await request).outputs[0].finish_reason == "timeout"


async def test_the_next_engine_is_told_of_the_time_that_is_left(endpoint: str) -> None:
    async with _connected(endpoint) as (old, client):
        request = await old.begin(_begin(client, timeout_s=1000.0))
        old.close()
        async with _next(endpoint, _welcome(1)) as new:
            again = await new.accept(1)
            assert again.timeout_s is not None
            assert 0 < again.timeout_s < 1000.0
            new.finish(1)
            await request


async def test_new_requests_go_to_another_engine_while_one_drains(
    endpoint: str, short_path: Path
) -> None:
    second = f"ipc://{short_path}/second.sock"
    async with _connected(endpoint, second) as (old, client):
        running = await old.begin(_begin(client, "running"))
        old.send(Draining(deadline_ms=1000))
        await _until_heard(old, client)
        new_one = _begin(client, "new")
        async with _next(second, _welcome(1)) as other:
            assert (await other.accept(1)).request_id == "new"
            old.output({1: [10]}, Event(handle=1, finish_reason="length"))
            other.finish(1)
            await new_one
            output = await running
        assert (output.outputs[0].token_ids, output.resumes) == ([10], ())


async def test_a_refusal_of_an_engine_that_drains_is_nobodys_error_if_there_is_another(
    endpoint: str, short_path: Path
) -> None:
    second = f"ipc://{short_path}/second.sock"
    async with _connected(endpoint, second) as (old, client):
        request = _begin(client)
        await old.receive(Submit)
        old.send(Draining())
        old.send(Error(code="draining", message="?", request_id="r", retry_after_s=30))
        async with _next(second, _welcome(1)) as other:
            await other.accept(1)
            other.finish(1)
            assert (await request).finished


async def test_a_refusal_of_the_only_engine_is_told(endpoint: str) -> None:
    async with _connected(endpoint) as (old, client):
        request = _begin(client)
        await old.receive(Submit)
        old.send(Error(code="draining", message="?", request_id="r", retry_after_s=30))
        with pytest.raises(EngineDrainingError) as caught:
            await request
        assert caught.value.retry_after_s == 30


async def test_what_an_engine_cuts_as_it_stops_goes_on_with_the_next(endpoint: str) -> None:
    async with _connected(endpoint) as (old, client):
        request = await old.begin(_begin(client, n=2))
        cut = [Event(handle=i, finish_reason="abort", message="SIGTERM") for i in (1, 2)]
        old.output({1: [10], 2: [20]}, *cut)
        old.send(Bye(reason="SIGTERM"))
        await old.flush()
        old.close()
        async with _next(endpoint, _welcome(1)) as new:
            assert [_tokens(await new.accept(handle)) for handle in (1, 2)] == [[10], [20]]
            new.finish(1)
            new.finish(2)
            reasons = [one.finish_reason for one in (await request).outputs]
        assert reasons == ["length", "length"]


@pytest.mark.parametrize("says_bye", [True, False])
async def test_what_an_engine_has_cut_ends_as_it_said_if_none_comes(
    endpoint: str, says_bye: bool
) -> None:
    async with _connected(endpoint, resume_timeout_s=0.01) as (old, client):
        request = await old.begin(_begin(client))
        cut = Event(handle=1, finish_reason="abort", message="SIGTERM")
        old.output({1: [10]}, cut)
        if says_bye:  # else it is there for a moment more, and is not sent the request again
            old.send(Bye(reason="SIGTERM"))
            await old.flush()
            old.close()
        (sample,) = (await request).outputs
        assert (sample.finish_reason, sample.message) == ("abort", "SIGTERM")


async def test_who_waited_in_vain_is_told_what_was_lost_and_why(endpoint: str) -> None:
    async with _connected(endpoint, resume_timeout_s=0.01) as (old, client):
        request = await old.begin(_begin(client))
        old.close()
        with pytest.raises(EngineDeadError, match="was closed; nothing listens"):
            await request


async def test_nobody_waits_longer_than_that_for_somebody_who_says_nothing(
    endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nanocore.client.connection.session_manager.REOPEN_TIMEOUT_S", 1000.0)

    async with _connected(endpoint, resume_timeout_s=0.01) as (old, client):
        request = await old.begin(_begin(client))
        old.close()
        silent = FakeEngine(endpoint)
        with pytest.raises(EngineDeadError, match="was closed"):
            await request
        silent.close()


async def test_a_client_that_is_closed_fails_what_waits(endpoint: str) -> None:
    async with _connected(endpoint) as (old, client):
        request = await old.begin(_begin(client))
        old.close()
        await until_lost(client)
    with pytest.raises(ClientStateError, match="was closed"):
        await request


async def test_an_engine_that_is_too_busy_for_what_it_gets_back_is_asked_again(
    endpoint: str,
) -> None:
    async with _connected(endpoint) as (old, client):
        request = await old.begin(_begin(client))
        await _lose(old, client, {1: [10]})
        async with _next(endpoint, _welcome(1)) as new:
            for _ in range(2):
                assert (await new.receive(Submit)).request_id == "r"
                busy = Error(code="overloaded", message="busy", request_id="r", retry_after_s=0.0)
                new.send(busy)
            assert _tokens(await new.accept(1)) == [10]
            new.finish(1)
            resumes = (await request).resumes
            assert len(resumes) == 3
            assert all(one.next_s is not None for one in resumes), "a token ended all of them"


async def test_a_request_that_engines_die_of_fails_alone(endpoint: str) -> None:
    """The bystander was open in each death but those of which the other one is guilty."""

    async with _connected(endpoint) as (old, client):
        killer = await old.begin(_begin(client, "killer"))
        bystander = await old.begin(_begin(client, "bystander"), 2)
        old.close()
        async with _next(endpoint, _welcome(1)) as second:
            sent = {(await second.accept(i)).request_id for i in (1, 2)}
            assert sent == {"killer", "bystander"}
        for number in (2, 3):  # with two deaths each is tried alone
            async with _next(endpoint, _welcome(number)) as alone:
                while (await alone.accept(1)).request_id != "killer":
                    alone.output({1: [30]})
        async with _next(endpoint, _welcome(4)) as last:
            with pytest.raises(EngineDeadError, match="4 engines died while this request"):
                await killer
            while not bystander.done():
                if (await last.accept(1)).request_id == "bystander":
                    last.finish(1)
                    await bystander


async def test_no_time_is_asked_for_that_an_older_engine_does_not_know(endpoint: str) -> None:
    engine = FakeEngine(endpoint)
    welcoming = asyncio.create_task(engine.welcome(replace(_welcome(0), protocol=(1, 8))))
    async with AsyncEngineClient.connect(endpoint) as client:
        await welcoming
        request = asyncio.create_task(client.complete([1], NO_TEXT))
        frames = await asyncio.to_thread(engine._next_frames)
        assert frames[0] == b"\x10", "the first word after HELLO is the SUBMIT"
        submit = engine._decoder.decode(frames)
        assert isinstance(submit, Submit)
        engine.send(Accepted(request_id=submit.request_id, handle=1, seed=0))
        engine.finish(1)
        await request
    engine.close()
