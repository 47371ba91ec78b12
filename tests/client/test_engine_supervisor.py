"""EngineSupervisor, with stand-in processes: which are replaced, and when."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from nanocore.client import EngineDeadError, EngineStartError
from nanocore.client.connection.engine_supervisor import EngineSupervisor
from nanocore.protocol.errors import NanocoreError
from tests.end_to_end.rank_processes import child_pids

# Each script is run for every engine; `number` counts them, from 0 on.
SETUP = """
import os, signal, sys, time
link = int(sys.argv[1].partition("=")[2])
folder = os.path.dirname(sys.argv[2].partition("ipc://")[2])
number = sum(name.isdigit() for name in os.listdir(folder))
open(os.path.join(folder, f"{number}"), "w").close()
def ready(): os.write(link, b'{}\\n')
def refuse(code): os.write(link, b'{"error":"it cannot","exit_code":%d}\\n' % code); sys.exit(code)
"""
LIVES = "ready(); time.sleep(1000)"
DIES = "ready(); os.kill(os.getpid(), 9)"


class Watched:
    """A supervisor, and what it said. news: ints are deaths, None is readiness, errors are ends."""

    def __init__(self, supervisor: EngineSupervisor) -> None:
        self.supervisor = supervisor
        self.news: asyncio.Queue[int | NanocoreError | None] = asyncio.Queue()
        supervisor.on_death(self.news.put_nowait)
        supervisor.on_ready(lambda: self.news.put_nowait(None))
        supervisor.on_ended(self.news.put_nowait)

    async def until_end(self) -> list[int | NanocoreError | None]:
        heard: list[int | NanocoreError | None] = []
        while not heard or not isinstance(heard[-1], NanocoreError):
            heard.append(await self.news.get())
        return heard


@pytest.fixture(autouse=True)
def nothing_is_left(monkeypatch: pytest.MonkeyPatch, short_path: Path) -> Iterator[None]:
    monkeypatch.setattr("tempfile.tempdir", str(short_path))
    monkeypatch.setattr("nanocore.client.connection.engine_supervisor._FIRST_PAUSE_S", 0.0)
    before = len(os.listdir("/proc/self/fd"))
    children = child_pids(os.getpid())  # of what ran here before
    yield
    assert list(short_path.iterdir()) == []
    assert len(os.listdir("/proc/self/fd")) == before
    assert set(child_pids(os.getpid())) <= set(children)  # no zombie, either


Engines = Callable[..., AbstractAsyncContextManager[tuple[EngineSupervisor, Watched]]]


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> Engines:
    """A supervisor that has started an engine, which runs this script, and is stopped at the end.

    options: of EngineSupervisor.
    """

    @asynccontextmanager
    async def started(
        script: str, **options: Any
    ) -> AsyncIterator[tuple[EngineSupervisor, Watched]]:
        command = (sys.executable, "-S", "-c", SETUP + script)
        monkeypatch.setattr("nanocore.client.connection.engine_process.COMMAND", command)
        supervisor = EngineSupervisor([], **options)
        watched = Watched(supervisor)
        await supervisor.start(60)
        yield supervisor, watched
        await supervisor.stop()

    return started


async def test_an_engine_that_is_killed_is_replaced_at_the_same_endpoint(engines: Engines) -> None:
    async with engines(LIVES) as (supervisor, watched):
        endpoint, pids = supervisor.endpoint, {supervisor.pid}
        for _ in range(1, 4):
            os.kill(supervisor.pid, signal.SIGKILL)
            assert await watched.news.get() == -signal.SIGKILL
            assert supervisor.is_restarting
            assert await watched.news.get() is None
            assert (supervisor.is_restarting, supervisor.ended) == (False, None)
            assert supervisor.last_ready_s > supervisor.last_death_s > 0
            pids.add(supervisor.pid)
        assert supervisor.endpoint == endpoint
        assert len(pids) == 4
        await supervisor.stop()


async def test_an_engine_that_stands_still_is_replaced(
    engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nanocore.client.connection.engine_supervisor._STOPPED_POLL_S", 0.0)
    async with engines(LIVES) as (supervisor, watched):
        os.kill(supervisor.pid, signal.SIGSTOP)
        assert [await watched.news.get(), await watched.news.get()] == [-9, None]


async def test_an_engine_that_dies_again_and_again_is_given_up(engines: Engines) -> None:
    async with engines(DIES, max_restarts=3) as (supervisor, watched):
        *heard, error = await watched.until_end()
        assert heard == [-9, None] * 3
        assert isinstance(error, EngineDeadError)
        assert str(error) == "the engine process exited with code -9, after 3 restarts in a row"
        assert supervisor.ended is error


async def test_progress_begins_a_new_row_of_restarts(engines: Engines) -> None:
    async with engines(LIVES, max_restarts=1) as (supervisor, watched):
        for _ in range(3):
            os.kill(supervisor.pid, signal.SIGKILL)
            assert [await watched.news.get(), await watched.news.get()] == [-9, None]
            supervisor.progress()
        os.kill(supervisor.pid, signal.SIGKILL)
        assert [await watched.news.get(), await watched.news.get()] == [-9, None]
        os.kill(supervisor.pid, signal.SIGKILL)
        assert "after 1 restart in a row" in str(await watched.news.get())


async def test_an_engine_that_has_served_for_long_begins_a_new_row_of_restarts(
    engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nanocore.client.connection.engine_supervisor._SETTLED_S", 0.0)
    async with engines(LIVES, max_restarts=1) as (supervisor, watched):
        for _ in range(3):
            os.kill(supervisor.pid, signal.SIGKILL)
            assert [await watched.news.get(), await watched.news.get()] == [-9, None]


@pytest.mark.parametrize("code", [0, 2, 3, 5, 7, 130])
async def test_an_engine_that_was_told_to_end_has_ended(engines: Engines, code: int) -> None:
    async with engines(f"ready(); sys.exit({code})") as (_, watched):
        (error,) = await watched.until_end()
        assert str(error) == f"the engine process exited with code {code}"


async def test_without_restarts_the_first_death_is_the_end(engines: Engines) -> None:
    async with engines(DIES, max_restarts=0) as (_, watched):
        (error,) = await watched.until_end()
        assert str(error) == "the engine process exited with code -9"


@pytest.mark.parametrize("code", [70, 4])
async def test_errors_of_an_engines_own_are_deaths(engines: Engines, code: int) -> None:
    script = f"ready(); sys.exit({code}) if number == 0 else time.sleep(1000)"
    async with engines(script) as (_, watched):
        assert [await watched.news.get(), await watched.news.get()] == [code, None]


@pytest.mark.parametrize("code", [2, 3])
async def test_a_restart_that_cannot_be_is_the_end_with_its_cause(
    engines: Engines, code: int
) -> None:
    script = f"refuse({code}) if number else ready(); os.kill(os.getpid(), 9)"
    async with engines(script) as (_, watched):
        death, error = await watched.until_end()
        assert death == -9
        assert isinstance(error, EngineStartError)
        assert (str(error), error.exit_code) == ("it cannot", code)


@pytest.mark.parametrize("failure", ["refuse(5)", "refuse(4)", "os.kill(os.getpid(), 9)"])
async def test_what_the_last_engines_remains_may_cause_is_tried_again(
    engines: Engines, failure: str
) -> None:
    last = "ready(); time.sleep(1000) if number else os.kill(os.getpid(), 9)"
    script = f"{failure} if number in (1, 2) else None; {last}"
    async with engines(script, max_restarts=3) as (_, watched):
        assert [await watched.news.get(), await watched.news.get()] == [-9, None]


async def test_restarts_that_fail_count_as_restarts(engines: Engines) -> None:
    script = "refuse(5) if number else ready(); os.kill(os.getpid(), 9)"
    async with engines(script, max_restarts=2) as (_, watched):
        death, error = await watched.until_end()
        assert (death, str(error)) == (-9, "it cannot, after 2 restarts in a row")


async def test_what_an_engine_that_was_killed_has_started_is_killed(engines: Engines) -> None:
    async with engines(
        "import subprocess;"
        "child = subprocess.Popen([sys.executable, '-S', '-c', 'import time; time.sleep(1000)']);"
        "open(os.path.join(folder, 'child'), 'w').write(str(child.pid));" + LIVES,
        max_restarts=0,
    ) as (supervisor, watched):
        folder = Path(supervisor.endpoint.removeprefix("ipc://")).parent
        child = os.pidfd_open(int((folder / "child").read_text()))
        ended = asyncio.Event()
        asyncio.get_running_loop().add_reader(child, ended.set)
        os.kill(supervisor.pid, signal.SIGKILL)
        await watched.until_end()
        await ended.wait()
        asyncio.get_running_loop().remove_reader(child)
        os.close(child)


STANDS_BY = """
if "--standby" in sys.argv:
    open(os.path.join(folder, f"stands by {number}"), "w").close()
    os.write(link, b'{"standing_by":true}\\n')
    while not os.path.exists(os.path.join(folder, f"go {number}")):
        time.sleep(0.001)
"""


async def test_a_standby_takes_over_and_the_next_one_is_started(engines: Engines) -> None:
    async with engines(STANDS_BY + LIVES, standby=True) as (supervisor, watched):
        folder = Path(supervisor.endpoint.removeprefix("ipc://")).parent
        for _ in range(2):
            while (next_pid := supervisor.standby_pid) is None:
                await asyncio.sleep(0)
            os.kill(supervisor.pid, signal.SIGKILL)
            assert await watched.news.get() == -9
            assert supervisor.standby_pid == next_pid
            for waiting in folder.glob("stands by *"):
                (folder / f"go {waiting.name.rpartition(' ')[2]}").touch()
            assert await watched.news.get() is None
            assert supervisor.pid == next_pid


async def test_a_standby_that_dies_is_replaced_and_one_that_cannot_be_is_done_without(
    engines: Engines,
) -> None:
    async with engines(
        "refuse(3) if number == 2 else None\n" + STANDS_BY.replace("go {number}", "none") + LIVES,
        standby=True,
    ) as (supervisor, watched):
        folder = Path(supervisor.endpoint.removeprefix("ipc://")).parent
        while (pid := supervisor.standby_pid) is None:
            await asyncio.sleep(0)
        os.kill(pid, signal.SIGKILL)
        while not (folder / "2").exists() or supervisor._processes[1:]:
            await asyncio.sleep(0)
        assert (supervisor.ended, supervisor.is_restarting) == (None, False)
        os.kill(supervisor.pid, signal.SIGKILL)
        assert [await watched.news.get(), await watched.news.get()] == [-9, None]


@pytest.mark.parametrize("num_cancels", [1, 2, 3])
@pytest.mark.parametrize("standby", [False, True])
async def test_stopping_while_an_engine_is_restarted_leaves_nothing(
    engines: Engines, standby: bool, num_cancels: int
) -> None:
    script = STANDS_BY + "ready() if number == 0 else None; time.sleep(1000)"
    async with engines(script, standby=standby) as (supervisor, watched):
        os.kill(supervisor.pid, signal.SIGKILL)
        await watched.news.get()
        stopping = asyncio.create_task(supervisor.stop())
        for _ in range(num_cancels - 1):
            await asyncio.sleep(0)
            stopping.cancel()
        await asyncio.wait({stopping})
        assert watched.news.empty()
