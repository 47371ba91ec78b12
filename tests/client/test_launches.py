"""Launches that fail or are given up, with a process that is no engine and quickly there."""

from __future__ import annotations

import asyncio
import fcntl
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nanocore.client import LLM, AsyncEngineClient, EngineDeadError, EngineStartError
from nanocore.client.connection.engine_process import EngineProcess, LaunchDirectory

READY = "import os, sys, time; os.write(int(sys.argv[1].partition('=')[2]), b'{}\\n'); "
SCRIPTS = {
    "says nothing": "import time; time.sleep(1000)",
    "is deaf to SIGTERM": READY + "import signal; signal.signal(15, signal.SIG_IGN);"
    "time.sleep(1000)",
    "serves nobody": READY + "time.sleep(1000)",
}


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, short_path: Path) -> Iterator[list[EngineProcess]]:
    """The processes that were launched; they and their directories must be gone at the end."""
    processes: list[EngineProcess] = []
    make = EngineProcess.__init__

    def start(self: EngineProcess, *arguments: Any) -> None:
        make(self, *arguments)
        processes.append(self)

    monkeypatch.setattr(EngineProcess, "__init__", start)
    monkeypatch.setattr("tempfile.tempdir", str(short_path))
    monkeypatch.setattr("nanocore.client.connection.engine_process.STOP_TIMEOUT_S", 0.01)
    yield processes
    assert all(process._process.returncode is not None for process in processes), "a zombie"
    assert list(short_path.iterdir()) == []


def _launches(monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    command = (sys.executable, "-S", "-c", SCRIPTS[script])
    monkeypatch.setattr("nanocore.client.connection.engine_process.COMMAND", command)


@pytest.mark.parametrize("num_cancels", [1, 2, 3])
@pytest.mark.parametrize("script", SCRIPTS)
async def test_cancelling_a_launch_leaves_nothing_however_impatiently(
    monkeypatch: pytest.MonkeyPatch, started: list[EngineProcess], script: str, num_cancels: int
) -> None:
    _launches(monkeypatch, script)

    client = AsyncEngineClient.launch()
    entering = asyncio.create_task(client.__aenter__())
    while not (started if script == "says nothing" else client._manager):
        await asyncio.sleep(0)
    for _ in range(num_cancels):
        entering.cancel()
        for _ in range(3):
            await asyncio.sleep(0)
    with pytest.raises(asyncio.CancelledError):
        await entering
    assert len(started) == 1


def test_a_launch_that_takes_too_long_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, started: list[EngineProcess]
) -> None:
    _launches(monkeypatch, "says nothing")
    with pytest.raises(EngineStartError, match=r"not ready after 0\.01 s.*start_timeout_s"):
        LLM(start_timeout_s=0.01)
    assert len(started) == 1


def test_an_engine_that_dies_once_it_is_ready_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, started: list[EngineProcess]
) -> None:
    monkeypatch.setitem(SCRIPTS, "dies", READY + "sys.exit(7)")
    _launches(monkeypatch, "dies")
    with pytest.raises(EngineDeadError, match="exited with code 7"):
        LLM()
    assert len(started) == 1


def test_a_launch_without_room_for_its_directory_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "none"))
    with pytest.raises(EngineStartError, match=r"no engine process could be started.*none"):
        LLM()


def test_a_launch_in_a_directory_whose_name_is_too_long_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = tmp_path / ("x" * 100)
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    with pytest.raises(EngineStartError, match="absolute path of at most 107 bytes"):
        LLM()
    assert list(folder.iterdir()) == []


def test_a_launch_removes_what_dead_clients_left_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch, short_path: Path
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(short_path))
    left_over, mine = LaunchDirectory(), LaunchDirectory()
    (left_over.path / "engine.sock").touch()
    os.close(left_over._fd)  # as the kernel does it when a process dies
    other = short_path / "nanocore-1000"
    other.mkdir()
    (short_path / "nanocore-launch-link").symlink_to(other)
    new = LaunchDirectory()
    assert not left_over.path.exists()
    assert mine.path.exists()
    assert new.path.stat().st_mode & 0o777 == 0o700
    assert other.exists()
    for directory in (mine, new):
        directory.remove()
        directory.remove()
        assert not directory.path.exists()


def test_a_directory_that_another_launch_takes_for_left_over_is_made_again(
    monkeypatch: pytest.MonkeyPatch, short_path: Path
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(short_path))
    names = []

    def lock(fd: int, how: int, flock: Any = fcntl.flock) -> None:
        if how == fcntl.LOCK_EX and not names:
            names.append(next(short_path.iterdir()))
            names[0].rmdir()
        flock(fd, how)

    monkeypatch.setattr("fcntl.flock", lock)
    directory = LaunchDirectory()
    assert directory.path.exists()
    assert directory.path != names[0]
    directory.remove()
