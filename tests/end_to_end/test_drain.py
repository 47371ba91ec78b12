"""An engine that is told to end finishes what runs: with real processes, signals and sockets.

Its clients speak plain frames, so that what they are told, and when, is the engine's doing alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from nanocore.client import AsyncEngineClient
from nanocore.protocol.messages import Op
from tests.end_to_end import forked
from tests.end_to_end.test_wire import Body, RawClient, submit

MAX_TOKENS = 400
PATIENCE_S = 120.0
NUM_SAMPLES = 128
TOKEN_BYTES = 4
CROWD = submit("crowd", n=NUM_SAMPLES, max_tokens=MAX_TOKENS)
"""With a row for one of them at a time, no machine is through with them in a tenth of a second."""
ONE_ROW = ("--max-num-seqs", "1")
NO_TIME = ("--shutdown-timeout", "0.1")


@contextlib.asynccontextmanager
async def session(endpoint: str, minor: int = 9) -> AsyncIterator[RawClient]:
    client = RawClient(endpoint)
    try:
        assert (await client.hello(minor))["protocol"] == [1, minor]
        yield client
    finally:
        client.close()


async def next_op(client: RawClient, *ops: Op) -> Body:
    """The next message but for OUTPUTs, which is to be one of these."""
    while True:
        op, body = await client.receive()
        if op in ops:
            return body
        assert op == Op.OUTPUT, Op(op).name


async def begin(client: RawClient, request: Body) -> None:
    """Submit a request, and wait for its first token."""
    await client.send(Op.SUBMIT, request)
    op, _ = await client.receive()
    assert op == Op.ACCEPTED
    op, output = await client.receive()
    assert op == Op.OUTPUT
    assert len(output["tokens"]) == TOKEN_BYTES


async def read_to_the_end(client: RawClient) -> str:
    """The finish_reason of the request that has begun; all of its tokens must come."""
    num_bytes = TOKEN_BYTES
    while True:
        op, body = await client.receive()
        assert op in (Op.OUTPUT, Op.DRAINING)
        num_bytes += len(body.get("tokens", b""))
        for event in body.get("events", []):
            if "finish_reason" in event:
                assert num_bytes == TOKEN_BYTES * MAX_TOKENS
                return str(event["finish_reason"])


async def read_to_bye(client: RawClient) -> tuple[list[Body], str]:
    """(the events that end requests, the reason of the BYE)."""
    ends: list[Body] = []
    while True:
        op, body = await client.receive()
        if op == Op.BYE:
            return ends, body["reason"]
        ends += [event for event in body.get("events", []) if "finish_reason" in event]


def run(script: Callable[..., Awaitable[None]], *arguments: Any) -> None:
    asyncio.run(asyncio.wait_for(script(*arguments), PATIENCE_S))  # type: ignore[arg-type]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_a_stream_that_runs_ends_whole_and_new_requests_are_refused(
    tiny_model: Path, number: signal.Signals, code: int
) -> None:
    async def main(endpoint: str, pid: int) -> None:
        async with session(endpoint) as client, session(endpoint) as other:
            stream = submit(max_tokens=MAX_TOKENS)
            await begin(client, stream)
            await begin(other, CROWD)  # it keeps the engine from ending
            os.kill(pid, number)
            draining = await next_op(other, Op.DRAINING)
            assert 0 < draining["deadline_ms"] <= 600_000
            await other.send(Op.SUBMIT, submit("new"))
            refused = await next_op(other, Op.ERROR)
            assert (refused["code"], refused["request_id"]) == ("draining", "new")
            assert refused["retry_after_s"] > 0
            assert await read_to_the_end(client) == "length"
            await other.send(Op.ABORT, {"request_ids": ["crowd"]})
            assert await read_to_bye(client) == ([], number.name)
            ends, reason = await read_to_bye(other)
            assert reason == number.name
            assert not any("message" in end for end in ends), "its client asked for it"

    flags = ("--max-num-seqs", "2", "--shutdown-timeout", "600")
    with forked.engine(tiny_model, *flags) as running:
        run(main, running.endpoint, running.pid)
        assert running.wait() == code
        log = running.stderr.read_text()
    assert f"{number.name}: {1 + NUM_SAMPLES} open requests" in log
    assert f"{number.name}: no requests in flight, exiting" in log


def test_a_session_that_is_opened_meanwhile_is_told_and_one_of_an_old_client_is_not(
    tiny_model: Path,
) -> None:
    async def main(endpoint: str, pid: int) -> None:
        async with session(endpoint) as client, session(endpoint, minor=8) as old:
            await begin(client, CROWD)
            await client.send(Op.CONTROL, {"call_id": 3, "operation": "drain"})
            assert (await next_op(client, Op.REPLY)).get("ok", True)
            await next_op(client, Op.DRAINING)
            async with session(endpoint) as newcomer:
                op, draining = await newcomer.receive()
                assert op == Op.DRAINING
                assert 0 < draining["deadline_ms"] < 600_000
            async with session(endpoint, minor=8) as late:
                await late.send(Op.CONTROL, {"call_id": 1, "operation": "stats"})
                assert (await late.receive())[0] == Op.REPLY
                await late.send(Op.SUBMIT, submit("new"))
                op, error = await late.receive()
                assert (op, error["code"]) == (Op.ERROR, "draining")
            await client.send(Op.ABORT, {"request_ids": ["crowd"]})
            ends, reason = await read_to_bye(client)
            assert [end["finish_reason"] for end in ends] == ["abort"] * NUM_SAMPLES
            assert reason == "drain"
            assert await read_to_bye(old) == ([], "drain")
            await asyncio.to_thread(select.select, [pid], [], [])  # until it ends

    with forked.engine(tiny_model, *ONE_ROW, "--shutdown-timeout", "600") as running:
        pidfd = os.pidfd_open(running.pid)
        run(main, running.endpoint, pidfd)
        os.close(pidfd)
        assert running.wait() == 0


def test_the_deadline_cuts_what_is_left_and_says_why(tiny_model: Path) -> None:
    async def main(endpoint: str, pid: int) -> None:
        async with session(endpoint) as client:
            await begin(client, CROWD)
            os.kill(pid, signal.SIGTERM)
            assert (await next_op(client, Op.DRAINING))["deadline_ms"] <= 100
            ends, reason = await read_to_bye(client)
            assert reason == "SIGTERM: not done within 0.1 s (--shutdown-timeout)"
            assert ends[-1]["finish_reason"] == "abort"
            assert ends[-1]["message"] == reason

    with forked.engine(tiny_model, *ONE_ROW, *NO_TIME) as running:
        run(main, running.endpoint, running.pid)
        assert running.wait() == 0


def test_without_time_nothing_is_waited_for(tiny_model: Path) -> None:
    async def main(endpoint: str, pid: int) -> None:
        async with session(endpoint) as client:
            await begin(client, CROWD)
            os.kill(pid, signal.SIGINT)
            ends, reason = await read_to_bye(client)
            assert {(end["finish_reason"], end.get("message")) for end in ends} >= {
                ("abort", "SIGINT")
            }
            assert reason == "SIGINT"

    with forked.engine(tiny_model, *ONE_ROW, "--shutdown-timeout", "0") as running:
        run(main, running.endpoint, running.pid)
        assert running.wait() == 130


def test_a_second_signal_ends_it_at_once(tiny_model: Path) -> None:
    async def main(endpoint: str, pid: int) -> None:
        async with session(endpoint) as client:
            await begin(client, CROWD)
            os.kill(pid, signal.SIGTERM)
            await next_op(client, Op.DRAINING)
            os.kill(pid, signal.SIGTERM)

    with forked.engine(tiny_model, *ONE_ROW, "--shutdown-timeout", "600") as running:
        run(main, running.endpoint, running.pid)
        assert running.wait() == 130


@pytest.mark.parametrize("how", ["SIGHUP", "paused"])
def test_what_is_not_waited_for_ends_at_once(tiny_model: Path, how: str) -> None:
    async def main(endpoint: str, pid: int) -> None:
        async with session(endpoint) as client:
            await begin(client, CROWD)
            if how == "paused":
                await client.send(Op.CONTROL, {"call_id": 3, "operation": "pause"})
                await next_op(client, Op.REPLY)
                os.kill(pid, signal.SIGTERM)
            else:
                os.kill(pid, signal.SIGHUP)
            ends, reason = await read_to_bye(client)
            assert ends[-1]["finish_reason"] == "abort"
            assert ends[-1]["message"] == reason
            assert "paused" in reason if how == "paused" else reason == "SIGHUP"

    with forked.engine(tiny_model, *ONE_ROW, "--shutdown-timeout", "600") as running:
        run(main, running.endpoint, running.pid)


@pytest.mark.usefixtures("forked_launches")
def test_a_launched_engine_ends_with_its_client_and_waits_for_nobody_else(
    tiny_model: Path,
) -> None:
    async def main() -> None:
        arguments = {"max_num_seqs": 1, "shutdown_timeout": 600.0}
        async with AsyncEngineClient.launch(tiny_model, **arguments) as owner:
            joined = RawClient(owner.endpoint)
            await joined.hello(9)
            await begin(joined, CROWD)
        ends, _ = await read_to_bye(joined)
        joined.close()
        assert ends[-1]["finish_reason"] == "abort"
        assert ends[-1]["message"] == "the launching client is gone"

    run(main)
