"""P6: what a client leaves behind when it is killed, or stopped, ends; others notice nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from nanocore.protocol.messages import Op, Reply
from tests.reliability.bystanders import Answers, run_beside
from tests.reliability.visitor import visitor
from tests.reliability.watched_engine import WatchedEngine

ROOT = Path(__file__).parents[2]
NUM_SAMPLES = 3
CLIENT = f"""
import random, signal, sys
from nanocore.protocol.messages import MIN_SESSION_TIMEOUT_MS, Bye, Error, Op, Output
from tests.hostile.messages import submit
from tests.reliability.visitor import Visitor
client = Visitor(sys.argv[1])
client.send(Op.PING, session_timeout_ms=MIN_SESSION_TIMEOUT_MS)
body = submit(random.Random(9))
body["sampling"].update(max_tokens=900, n={NUM_SAMPLES})
client.send(Op.SUBMIT, **body)
client.hear_of(Output)
print("streaming", flush=True)
while not isinstance(client.hear(), (Bye, Error)):
    pass
print("told", flush=True)
"""


@pytest.fixture
def client(engine: WatchedEngine) -> Iterator[subprocess.Popen[str]]:
    """A client in a process of its own, which can be killed."""
    command = [sys.executable, "-c", CLIENT, engine.endpoint]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_the_requests_of_a_client_that_is_gone_or_stands_still_end_and_others_go_on(
    engine: WatchedEngine,
    quiet: Answers,
    client: subprocess.Popen[str],
    number: signal.Signals,
) -> None:
    """While the engine is paused, so that they do not end by themselves."""
    assert client.stdout is not None
    stdout = client.stdout

    def attack() -> None:
        with visitor(engine.endpoint) as watching:
            num_aborts = watching.stats().num_aborts
            assert stdout.readline() == "streaming\n"
            watching.send(Op.CONTROL, call_id=1, operation="pause")
            assert watching.hear_of(Reply).ok
            os.kill(client.pid, number)
            while watching.stats().num_aborts < num_aborts + NUM_SAMPLES:
                pass
            watching.send(Op.CONTROL, call_id=2, operation="resume")
            watching.hear_of(Reply)
        if number == signal.SIGSTOP:
            os.kill(client.pid, signal.SIGCONT)
            assert stdout.readline() == "told\n"

    run_beside(engine.endpoint, quiet, attack)
