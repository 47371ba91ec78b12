"""Engines that are killed and replaced: nothing of them piles up, and a standby takes over."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from nanocore.client import AsyncEngineClient, SamplingParams
from nanocore.client.connection.engine_supervisor import EngineSupervisor
from nanocore.protocol.errors import NanocoreError
from tests.cli.served import Descendants, children
from tests.end_to_end import forked

PARAMS = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, detokenize=False)
RANKS = ["--tp", "2"]


async def answer(endpoint: str) -> list[int]:
    """What the engine that serves there says."""
    async with AsyncEngineClient.connect(endpoint, timeout_s=60) as client:
        return (await client.complete([1, 2, 3], PARAMS)).outputs[0].token_ids


async def stands_by(supervisor: EngineSupervisor, standby: bool) -> None:
    """Wait for the standby, if there is to be one."""
    while standby and supervisor.standby_pid is None:
        await asyncio.sleep(0.01)


def left_behind(folder: Path) -> tuple[int, list[str]]:
    """What engines share with their ranks has no names; what earlier tests left does not count."""
    gc.collect()
    return len(os.listdir("/proc/self/fd")), sorted(os.listdir(folder))


async def kill_one_after_another(flags: list[str], num_kills: int, standby: bool) -> None:
    """Kill engines; what is there beside the engine that serves is the same after each."""
    others = set(children(os.getpid()))
    supervisor = EngineSupervisor(flags, standby=standby)
    news: asyncio.Queue[NanocoreError | None] = asyncio.Queue()
    supervisor.on_ready(lambda: news.put_nowait(None))
    supervisor.on_ended(news.put_nowait)
    await supervisor.start(120)
    folder = Path(supervisor.endpoint.removeprefix("ipc://")).parent
    await stands_by(supervisor, standby)
    said, left = [await answer(supervisor.endpoint)], [left_behind(folder)]
    for _ in range(num_kills):
        below = Descendants(supervisor.pid)
        os.kill(supervisor.pid, signal.SIGKILL)
        assert await news.get() is None
        await asyncio.to_thread(below.wait_until_all_end)
        supervisor.progress()
        said.append(await answer(supervisor.endpoint))
        await stands_by(supervisor, standby)
        assert set(children(os.getpid())) - others == {one.pid for one in supervisor._processes}
        assert len(supervisor._processes) == 1 + standby
        left.append(left_behind(folder))
    assert all(again == said[0] for again in said)
    assert left[-1] == left[0]
    await supervisor.stop()
    assert set(children(os.getpid())) <= others
    assert not folder.exists()


@pytest.mark.parametrize(
    ("flags", "num_kills", "standby"),
    [
        pytest.param([], 2, True, id="standby"),
        pytest.param(RANKS, 1, False, id="ranks"),
        pytest.param([], 20, False, id="20", marks=pytest.mark.campaign),
        pytest.param([], 20, True, id="20, standby", marks=pytest.mark.campaign),
        pytest.param(RANKS, 6, True, id="6, ranks, standby", marks=pytest.mark.campaign),
    ],
)
def test_nothing_of_engines_that_were_killed_piles_up(
    flags: list[str], num_kills: int, standby: bool
) -> None:
    asyncio.run(kill_one_after_another(flags, num_kills, standby))


KEEPS_TWO = """
import asyncio
from nanocore.client.connection.engine_supervisor import EngineSupervisor
async def main():
    supervisor = EngineSupervisor([], standby=True)
    await supervisor.start(60)
    while supervisor.standby_pid is None:
        await asyncio.sleep(0.01)
    print(supervisor.endpoint, flush=True)
    await asyncio.Event().wait()
asyncio.run(main())
"""


def test_neither_engine_nor_standby_nor_directory_outlives_a_client_that_is_killed() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", KEEPS_TWO], stdout=subprocess.PIPE, text=True
    ) as client:
        assert client.stdout is not None
        endpoint = client.stdout.readline().strip()
        below = Descendants(client.pid)
        assert len(below.pids) >= 2
        client.kill()
        client.wait()
        below.wait_until_all_end()
    assert not Path(endpoint.removeprefix("ipc://")).parent.exists()


class Standby:
    """A standalone engine, in one of whose log's lines it says that it stands by."""

    def __init__(self, endpoint: str, *flags: str) -> None:
        words = "--listen", endpoint, "--standby", *flags
        self.process = forked.Program(words)

    def line(self, text: str) -> str:
        return next(line for line in self.process.stderr if text in line)

    def end(self, number: int) -> int:
        self.process.send_signal(number)
        self.process.stderr.read()
        self.process.stderr.close()
        return self.process.wait()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_standby_serves_when_the_engine_at_its_endpoint_has_ended(
    number: signal.Signals, short_path: Path
) -> None:
    endpoint = f"ipc://{short_path}/e/engine.sock"
    first = Standby(endpoint)  # there is none to wait for
    first.line("ready in")
    said = asyncio.run(answer(endpoint))
    second = Standby(endpoint)
    second.line("standing by")
    first.end(number)
    assert str(first.process.pid) in second.line("taking over")
    second.line("ready in")
    assert asyncio.run(answer(endpoint)) == said
    assert second.end(signal.SIGTERM) == 0


@pytest.mark.parametrize(
    ("flags", "number", "code"),
    [([], signal.SIGTERM, 0), ([], signal.SIGINT, 130), (RANKS, signal.SIGTERM, 0)],
)
def test_a_signal_ends_an_engine_that_stands_by_and_the_other_goes_on(
    flags: list[str], number: signal.Signals, code: int, short_path: Path
) -> None:
    endpoint = f"ipc://{short_path}/e/engine.sock"
    first = Standby(endpoint)
    first.line("ready in")
    second = Standby(endpoint, *flags)
    second.line("standing by")
    below = Descendants(second.process.pid)
    assert second.end(number) == code
    below.wait_until_all_end()
    assert asyncio.run(answer(endpoint))
    assert first.end(signal.SIGTERM) == 0


def test_a_standby_ends_when_one_of_its_ranks_does(short_path: Path) -> None:
    endpoint = f"ipc://{short_path}/e/engine.sock"
    first = Standby(endpoint)
    first.line("ready in")
    second = Standby(endpoint, *RANKS)
    second.line("standing by")
    below = Descendants(second.process.pid)
    rank = next(pid for pid in below.pids if b"nanocore.worker" in _command_of(pid))
    os.kill(rank, signal.SIGKILL)
    second.line("was killed by SIGKILL")
    below.wait_until_all_end()
    assert second.end(0) == 70
    assert first.end(signal.SIGTERM) == 0


def _command_of(pid: int) -> list[bytes]:
    return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")


def test_a_standby_of_a_tcp_endpoint_is_refused() -> None:
    with tempfile.TemporaryDirectory() as folder:
        flags = "--listen", "tcp://127.0.0.1:1", "--curve-dir", folder, "--standby"
        done = forked.run_to_exit(*flags)
    assert done.returncode == 2
    assert "--standby True: it waits for the lock of an ipc endpoint" in done.stderr
