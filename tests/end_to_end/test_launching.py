"""Engines that a client launched: whatever ends the client, no process and no directory stays."""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from nanocore.client.connection import engine_process
from nanocore.client.connection.engine_process import EngineProcess, LaunchDirectory

EXIT_TIMEOUT_S = 60.0

# Each script launches an engine for the model that it is given, and prints what a shell would see.
SETUP = """
import asyncio, os, signal, sys, threading
from nanocore.client import LLM, AsyncEngineClient, SamplingParams
from nanocore.client.connection.engine_process import LaunchDirectory
from nanocore.client.connection.engine_process import EngineProcess

def left():
    try:
        os.waitpid(-1, os.WNOHANG)
        return "a child"
    except ChildProcessError:
        pass
    return "a directory" if os.path.exists(directory) else "nothing"
def threads():
    return [thread.name for thread in threading.enumerate() if thread.name != "tqdm_monitor"]

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have had it ignored
started = EngineProcess.__init__
def start(self, *arguments):
    global directory
    started(self, *arguments)
    directory = os.path.dirname(self.endpoint.removeprefix("ipc://"))
    print(self.pid, self.endpoint, flush=True)
EngineProcess.__init__ = start
LONG = SamplingParams(temperature=0, max_tokens=900, ignore_eos=True, detokenize=False)
"""

LLM_INTERRUPTED_AT_START = (
    SETUP
    + """
try:
    LLM(sys.argv[1])
except KeyboardInterrupt:
    print(left(), *threads(), flush=True)
"""
)
CLIENT_INTERRUPTED_AT_START = (
    SETUP
    + """
async def main():
    async with AsyncEngineClient.launch(sys.argv[1]):
        pass
try:
    asyncio.run(main())
except KeyboardInterrupt:
    print(left(), *threads(), flush=True)
"""
)
LLM_INTERRUPTED_LATER = (
    SETUP
    + """
def interrupt_when_it_runs():
    while not llm.stats().num_requests_running:
        pass
    os.kill(os.getpid(), signal.SIGINT)
llm = LLM(sys.argv[1])
threading.Thread(target=interrupt_when_it_runs).start()
try:
    while True:
        llm.generate([[1, 2, 3]] * 8, LONG, use_tqdm=False)
except KeyboardInterrupt:
    while (stats := llm.stats()).num_requests_running:
        pass
    print("aborted", stats.num_aborts > 0, flush=True)
stop = EngineProcess.stop
async def stop_and_be_interrupted(self):
    os.kill(os.getpid(), signal.SIGINT)
    await stop(self)
EngineProcess.stop = stop_and_be_interrupted
try:
    llm.close()
except KeyboardInterrupt:
    print(left(), *threads(), flush=True)
"""
)
SERVING = (
    SETUP
    + """
llm = LLM(sys.argv[1])
print("ready", flush=True)
threading.Event().wait()
"""
)
LOADING = (
    SETUP
    + """
process = EngineProcess(["--model", sys.argv[1]], LaunchDirectory())
print("ready", flush=True)
threading.Event().wait()
"""
)
FORGOTTEN = (
    SETUP
    + """
llm = LLM(sys.argv[1])
"""
)

# An engine of which nothing is in the cache folder: its model has no tokenizer, say.
STARTING = """
import socket, sys
descriptor = int(sys.argv[1].removeprefix("--parent-fd="))
link = socket.socket(fileno=descriptor)
link.sendall(b'{"files": []}\\n{}\\n')
link.recv(4096), link.recv(1)
"""


def launching(script: str, model: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", script, str(model)], stdout=subprocess.PIPE, text=True
    )


def wait_until_it_ends(descriptor: int) -> None:
    """Wait for the end of the process with this descriptor."""
    with contextlib.closing(select.epoll()) as poll:
        poll.register(descriptor, select.EPOLLIN)
        assert poll.poll(EXIT_TIMEOUT_S), "the engine outlives its launcher"
    os.close(descriptor)


@pytest.mark.parametrize("script", [LLM_INTERRUPTED_AT_START, CLIENT_INTERRUPTED_AT_START])
def test_ctrl_c_while_the_engine_starts_leaves_nothing(tiny_model: Path, script: str) -> None:
    with launching(script, tiny_model) as client:
        assert client.stdout is not None
        client.stdout.readline()
        client.send_signal(signal.SIGINT)
        assert client.stdout.readline() == "nothing MainThread\n"


def test_ctrl_c_in_generate_aborts_and_in_close_leaves_nothing(tiny_model: Path) -> None:
    with launching(LLM_INTERRUPTED_LATER, tiny_model) as client:
        assert client.stdout is not None
        client.stdout.readline()
        assert client.stdout.readline() == "aborted True\n"
        assert client.stdout.readline() == "nothing MainThread\n"


@pytest.mark.parametrize(
    ("script", "number"),
    [
        pytest.param(SERVING, signal.SIGKILL, id="serving"),
        pytest.param(LOADING, signal.SIGKILL, id="loading", marks=pytest.mark.campaign),
        pytest.param(LOADING, signal.SIGTERM, id="loading, SIGTERM"),
    ],
)
def test_the_engine_and_its_directory_are_gone_when_its_launcher_is_killed(
    tiny_model: Path, script: str, number: signal.Signals
) -> None:
    with launching(script, tiny_model) as client:
        assert client.stdout is not None
        pid, endpoint = client.stdout.readline().split()
        # A process file descriptor becomes readable when that very process has ended.
        descriptor = os.pidfd_open(int(pid))
        assert client.stdout.readline() == "ready\n"
        client.send_signal(number)
        client.wait()
        wait_until_it_ends(descriptor)
    directory = Path(endpoint.removeprefix("ipc://")).parent
    if script == LOADING:  # it may have had no time; then the next launch removes it
        LaunchDirectory().remove()
    assert not directory.exists()


def test_an_llm_that_nobody_closes_ends_with_its_process(tiny_model: Path) -> None:
    with launching(FORGOTTEN, tiny_model) as client:
        assert client.stdout is not None
        pid, endpoint = client.stdout.readline().split()
        wait_until_it_ends(os.pidfd_open(int(pid)))
    assert client.returncode == 0
    assert not Path(endpoint.removeprefix("ipc://")).parent.exists()


def test_an_engine_that_offers_no_files_is_not_ready_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_process, "COMMAND", [sys.executable, "-c", STARTING])
    directory = LaunchDirectory()
    heard: list[object] = []

    async def start() -> None:
        process = EngineProcess([], directory)
        try:
            await process.wait_ready(EXIT_TIMEOUT_S, heard.append)
        finally:
            process.kill()

    try:
        asyncio.run(start())
    finally:
        directory.remove()
    assert heard == [[]]
