"""Engines in processes forked from one that has imported what they import.

They are processes of their own, with their own exit code and standard error, and they run what
`nanocore-engine` runs; only the two seconds of CPU that importing takes are spent once for all.
The process that they are forked from never computes: the native threads of one that has computed
are not in its forks. What a test shows of the process itself, its parent and its children is shown
with one started anew (`engine_process.py`).
"""

from __future__ import annotations

import asyncio
import fcntl
import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace

from nanocore.client import AsyncEngineClient, SamplingParams
from nanocore.client.arguments import EngineArgument, engine_flags
from nanocore.client.connection import engine_process
from nanocore.engine_core.cli import main
from nanocore.protocol.messages import ModelCard
from nanocore.system.child_process import module_command
from tests.end_to_end.engine_process import EXIT_TIMEOUT_S

GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, detokenize=False)
_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(
    [
        "nanocore.engine_core.process.process",
        "nanocore.engine_core.process.check",
        "nanocore.worker.worker",
        "nanocore.cli.serve.command",
        "llguidance",
    ]
)
_FREE_FD = 100
"""Higher than the numbers of a new fork's own descriptors."""


def run_to_exit(*flags: str) -> subprocess.CompletedProcess[str]:
    """Run an engine that is expected to exit by itself."""
    with tempfile.TemporaryDirectory(prefix="nc-") as directory:
        stdout, stderr = Path(directory) / "out", Path(directory) / "log"
        process = start(stderr, flags, stdout=stdout)
        try:
            process.join(EXIT_TIMEOUT_S)
            assert process.exitcode is not None, "it still runs"
        finally:
            process.kill()
        output = stdout.read_text(), stderr.read_text()
        return subprocess.CompletedProcess(flags, process.exitcode, *output)


@dataclass
class Engine:
    """A running engine. stderr: the file its log goes to."""

    process: multiprocessing.process.BaseProcess
    endpoint: str
    stderr: Path

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def wait(self) -> int:
        """Wait for its end; its exit code."""
        self.process.join(EXIT_TIMEOUT_S)
        assert self.process.exitcode is not None, "it still runs"
        return self.process.exitcode


class Program:
    """A forked process whose log is read as it comes, with the methods of `subprocess.Popen`."""

    def __init__(self, flags: tuple[str, ...], run: Callable[[list[str]], None] = main) -> None:
        with tempfile.TemporaryDirectory(prefix="nc-") as directory:
            pipe = Path(directory) / "log"
            os.mkfifo(pipe)
            self._process = start(pipe, flags, run)
            self.stderr = pipe.open()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        self._process.kill()

    def wait(self, timeout_s: float = EXIT_TIMEOUT_S) -> int:
        self._process.join(timeout_s)
        assert self._process.exitcode is not None, "it still runs"
        return self._process.exitcode


@contextmanager
def engine(model: Path, *flags: str, endpoint: str | None = None) -> Iterator[Engine]:
    """Start an engine, by default at a private endpoint; clients can connect at once, and wait."""
    with tempfile.TemporaryDirectory(prefix="nc-") as directory:
        endpoint = endpoint or f"ipc://{directory}/e/engine.sock"
        stderr = Path(directory) / "log"
        process = start(stderr, ("--model", str(model), "--listen", endpoint, *flags))
        try:
            yield Engine(process, endpoint, stderr)
        finally:
            process.terminate()
            process.join(EXIT_TIMEOUT_S)


def ask(
    model: Path, prompt: Callable[[ModelCard], list[int]], **engine_args: EngineArgument
) -> tuple[ModelCard, list[int]]:
    """An engine's model card, and the tokens that it answers one prompt with."""

    async def complete(endpoint: str) -> tuple[ModelCard, list[int]]:
        async with AsyncEngineClient.connect(endpoint, timeout_s=60) as client:
            output = await client.complete(prompt(client.model_card), GREEDY)
            return client.model_card, list(output.outputs[0].token_ids)

    with engine(model, *engine_flags(engine_args)) as running:
        return asyncio.run(asyncio.wait_for(complete(running.endpoint), 60))


def start(
    stderr: Path,
    flags: tuple[str, ...],
    run: Callable[[list[str]], None] = main,
    stdout: Path | None = None,
) -> multiprocessing.process.BaseProcess:
    """Start a process that runs this with the flags; its log goes to the file or pipe `stderr`."""
    files = {2: stderr} if stdout is None else {1: stdout, 2: stderr}
    arguments = files, flags, run, os.environ["XDG_RUNTIME_DIR"]
    process = _FORKS.Process(target=_run, args=arguments)
    process.start()
    return process


class Fork:
    """What is used of `subprocess.Popen`, for a command of `module_command`."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        pass_fds: Sequence[int],
        stdin: int,
        stdout: int | None = None,
        stderr: int | None = None,
        env: Mapping[str, str] | None = None,
        start_new_session: bool = False,
    ) -> None:
        assert stdin == subprocess.DEVNULL
        outputs = {1: 1 if stdout is None else stdout, 2: 2 if stderr is None else stderr}
        kept = outputs | {fd: fd for fd in pass_fds}
        fds = {number: Connection(os.dup(fd)) for number, fd in kept.items()}
        words = list(command[len(module_command("")) - 1 :])
        environment = dict(os.environ if env is None else env)
        arguments = words, fds, environment, os.getcwd(), start_new_session
        self._process = _FORKS.Process(target=_become, args=arguments)
        self._process.start()
        for duplicate in fds.values():
            duplicate.close()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def wait(self, timeout_s: float | None = None) -> int:
        self._process.join(timeout_s)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired(str(self.pid), timeout_s or 0.0)
        return self._process.exitcode

    def kill(self) -> None:
        self._process.kill()


FORKS = SimpleNamespace(
    Popen=Fork, DEVNULL=subprocess.DEVNULL, TimeoutExpired=subprocess.TimeoutExpired
)
"""What stands for `subprocess` in a module that starts engines."""


def _fork_children() -> None:
    """Let this fork's engines be forks of the process that it was forked from.

    Ranks are started anew: forked ones once answered with other tokens, and why is not known.
    """
    forkserver._forkserver.ensure_running = lambda: None  # type: ignore[method-assign]
    engine_process.subprocess = FORKS  # type: ignore[attr-defined]


def _become(
    words: list[str],
    fds: dict[int, Connection],
    environment: dict[str, str],
    folder: str,
    is_session: bool,
) -> None:
    """Run a module with arguments, with these descriptors, as `__main__`."""
    if is_session:
        os.setsid()
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    moved = {}
    for number, connection in fds.items():
        moved[number] = fcntl.fcntl(connection.fileno(), fcntl.F_DUPFD, _FREE_FD)
        connection.close()
    for number, fd in moved.items():
        os.dup2(fd, number)
        os.close(fd)
    _fork_children()
    sys.argv = words
    runpy.run_module(words[0], run_name="__main__", alter_sys=True)


def _run(
    files: dict[int, Path], flags: tuple[str, ...], run: Callable[[list[str]], None], runtime: str
) -> None:
    os.environ["XDG_RUNTIME_DIR"] = runtime  # the test's of now, not that of the first fork
    for number, path in files.items():
        fd = os.open(path, os.O_WRONLY | os.O_CREAT)
        os.dup2(fd, number)
        os.close(fd)
    _fork_children()
    run(list(flags))
