"""Control operations and health: each answer finds its own call."""

from __future__ import annotations

import asyncio

import pytest
from msgspec.structs import replace

from nanocore.client import EngineDeadError, InvalidRequestError, ProtocolError
from nanocore.protocol.messages import Control, Ping, Pong, Reply
from nanocore.protocol.metrics import RecentSteps, Stats, StepColumns
from tests.client.fake_engine import connected, welcome_message
from tests.protocol.samples import STATS


def _stats(num_steps: int) -> Stats:
    return replace(STATS, num_steps=num_steps)


async def test_replies_in_any_order_find_their_calls(endpoint: str) -> None:
    async with connected(endpoint) as (engine, client):
        calls = [asyncio.create_task(client.stats()) for _ in range(3)]
        received = [await engine.receive(Control) for _ in range(3)]
        assert len({control.call_id for control in received}) == 3
        for i in (2, 0, 1):
            engine.send(Reply(call_id=received[i].call_id, stats=_stats(i)))
        assert [stats.num_steps for stats in await asyncio.gather(*calls)] == [0, 1, 2]


@pytest.mark.parametrize("ok", [True, False])
async def test_resetting_the_prefix_cache_says_whether_it_was_done(endpoint: str, ok: bool) -> None:
    async with connected(endpoint) as (engine, client):
        call = asyncio.create_task(client.reset_prefix_cache())
        control = await engine.receive(Control)
        assert control.operation == "reset_prefix_cache"
        engine.send(Reply(call_id=control.call_id, ok=ok))
        assert await call is ok


async def test_pause_and_resume_wait_for_their_replies(endpoint: str) -> None:
    async with connected(endpoint) as (engine, client):
        for operation, call in (("pause", client.pause), ("resume", client.resume)):
            waiting = asyncio.create_task(call())
            control = await engine.receive(Control)
            assert control.operation == operation
            assert not waiting.done()
            engine.send(Reply(call_id=control.call_id))
            await waiting


@pytest.mark.parametrize(("age_ms", "age_s"), [(None, None), (61_500, 61.5)])
async def test_health_has_the_engines_step_counter_and_the_age_of_a_step(
    endpoint: str, age_ms: int | None, age_s: float | None
) -> None:
    """Engines before 1.4 do not report the age."""
    async with connected(endpoint) as (engine, client):
        call = asyncio.create_task(client.health())
        ping = await engine.receive(Ping)
        engine.send(Pong(nonce=ping.nonce, num_steps=42, step_age_ms=age_ms))
        health = await call
        assert (health.num_steps, health.step_age_s) == (42, age_s)
        assert health.latency_s >= 0


async def test_an_engine_that_answers_no_ping_is_dead(
    endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nanocore.client.async_client.HEALTH_TIMEOUT_S", 0.05)

    async with connected(endpoint) as (_, client):
        with pytest.raises(EngineDeadError, match=r"within 0\.05 s"):
            await client.health()


async def test_answers_that_nobody_waits_for_are_ignored(endpoint: str) -> None:
    async with connected(endpoint) as (engine, client):
        call = asyncio.create_task(client.health())
        ping = await engine.receive(Ping)
        engine.send(Pong(nonce=ping.nonce + 1, num_steps=1))
        engine.send(Reply(call_id=ping.nonce, stats=_stats(1)))
        engine.send(Pong(nonce=ping.nonce, num_steps=2))
        engine.send(Pong(nonce=ping.nonce, num_steps=3))
        assert (await call).num_steps == 2


async def test_a_cancelled_call_leaves_the_session_as_it_was(endpoint: str) -> None:
    async with connected(endpoint) as (engine, client):
        cancelled = asyncio.create_task(client.stats())
        first = await engine.receive(Control)
        cancelled.cancel()
        call = asyncio.create_task(client.stats())
        second = await engine.receive(Control)
        engine.send(Reply(call_id=first.call_id, stats=_stats(1)))
        engine.send(Reply(call_id=second.call_id, stats=_stats(2)))
        assert (await call).num_steps == 2


async def test_recent_steps_are_those_after_a_number(endpoint: str) -> None:
    told = RecentSteps(now_s=2.5, stats=STATS, steps=StepColumns(number=[8]), requests=[])

    async with connected(endpoint) as (engine, client):
        for after in (0, 7):
            call = asyncio.create_task(client.recent_steps(after))
            control = await engine.receive(Control)
            assert (control.operation, control.after) == ("steps", after)
            engine.send(Reply(call_id=control.call_id, steps=told))
            assert await call == told
        call = asyncio.create_task(client.recent_steps())
        control = await engine.receive(Control)
        engine.send(Reply(call_id=control.call_id, ok=False, message="not today"))
        with pytest.raises(ProtocolError, match="reports no steps: not today"):
            await call


@pytest.mark.parametrize("after", [-1, 2**53, 1.0, True, "1", None])
async def test_a_number_that_no_step_has_is_not_sent(endpoint: str, after: int) -> None:
    async with connected(endpoint) as (_, client):
        with pytest.raises(InvalidRequestError, match=f"after={after!r}: "):
            await client.recent_steps(after)


async def test_an_engine_of_1_10_is_not_asked_for_steps(endpoint: str) -> None:
    """It would refuse the field, and end nothing that waits."""
    welcome = replace(welcome_message(), protocol=(1, 10))

    async with connected(endpoint, welcome) as (engine, client):
        with pytest.raises(ProtocolError, match=r"steps came with protocol 1\.11.* speaks 1\.10"):
            await client.recent_steps(3)
        call = asyncio.create_task(client.stats())
        control = await engine.receive(Control)
        assert control.operation == "stats", "nothing was sent before"
        engine.send(Reply(call_id=control.call_id, stats=STATS))
        await call
