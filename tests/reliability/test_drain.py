"""P11: an engine that drains ends what it has, refuses what is new, and exits in order."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from pathlib import Path

import pytest

from nanocore.client import AsyncEngineClient
from nanocore.protocol.messages import Accepted, Bye, Draining, Error, Op
from tests.end_to_end import forked
from tests.hostile.messages import submit
from tests.reliability.bystanders import answer_all, beside
from tests.reliability.visitor import PATIENCE_S, Visitor, visitor
from tests.reliability.watched_engine import DEMO_MODEL

NUM_LONG = 1000


def ask_to_drain(how: str, pid: int, client: Visitor) -> None:
    if how == "SIGTERM":
        os.kill(pid, signal.SIGTERM)
    else:
        client.send(Op.CONTROL, call_id=9, operation="drain")


@pytest.mark.parametrize("how", ["SIGTERM", "CONTROL"])
def test_who_runs_when_an_engine_drains_is_answered_whole_and_who_comes_is_refused(
    short_path: Path, how: str
) -> None:
    """It has more to do than it could in minutes, so that it does not end before it refused."""
    endpoint = f"ipc://{short_path}/e/engine.sock"

    def attack(pid: int) -> None:
        rng = random.Random(10)
        with visitor(endpoint) as client:
            names = [f"long-{number}" for number in range(NUM_LONG)]
            for name in names:
                body = submit(rng, request_id=name)
                body["sampling"]["max_tokens"] = 900
                client.send(Op.SUBMIT, **body)
            for _ in names:
                client.hear_of(Accepted)
            ask_to_drain(how, pid, client)
            client.hear_of(Draining)
            client.send(Op.SUBMIT, **submit(rng, request_id="late"))
            error = client.hear_of(Error)
            assert (error.code, error.request_id) == ("draining", "late")
            assert error.retry_after_s is not None
            client.send(Op.ABORT, request_ids=names)
            client.hear_of(Bye)

    async def main(pid: int) -> None:
        async with AsyncEngineClient.connect(endpoint, timeout_s=PATIENCE_S) as client:
            quiet = await answer_all(client)
        async with beside(endpoint, quiet, one_round=True):
            await asyncio.to_thread(attack, pid)

    flags = ("--model", str(DEMO_MODEL), "--listen", endpoint, "--max-num-seqs=8")
    process = forked.start(short_path / "log", flags)
    try:
        assert process.pid is not None
        asyncio.run(main(process.pid))
        process.join(PATIENCE_S)
        assert process.exitcode == 0
        assert [path.name for path in (short_path / "e").iterdir()] == ["engine.lock"]
    finally:
        process.kill()
