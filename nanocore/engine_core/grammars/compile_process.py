"""The engine's side of the compile process (`compile_server`): start, requests, restart, end.

A socket is the process's stdin. Its first message brings the vocabulary, as the descriptor of a
file in memory. Each other one brings the end of a socket pair for one request: a worker takes it,
says which one it is, and then the result. If a worker ends before, its parent says how.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import threading
import time
from contextlib import suppress
from typing import Final

import msgspec

from nanocore.engine_core.grammars.token_table import VocabularySource
from nanocore.protocol.errors import EngineOverloadedError, InvalidRequestError, shorten
from nanocore.protocol.structured_outputs import StructuredOutputs
from nanocore.system.child_process import module_command
from nanocore.worker.executors.pipe import Pipe

logger = logging.getLogger(__name__)

NUM_WORKERS: Final = 4
"""Concurrent compilations, each in a worker, with a thread of the engine."""
CPU_LIMIT_S: Final = 0.5
MEMORY_LIMIT_MIB: Final = 512
"""Address space that a compilation may add."""
WALL_LIMIT_S: Final = 60
"""Far above the CPU limit: the machine may be busy, and compilations are the least urgent work."""
LIMIT_SIGNALS: Final = (signal.SIGPROF, signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS)
"""Signals by which a limit ends a compilation; other ends are not the grammar's fault."""


class CompileResult(msgspec.Struct, frozen=True, omit_defaults=True):
    """llguidance's text, or why the request is refused, or the signal that ended the worker.

    not_held: what was left out. signal: 0 if the worker ended by itself. pid: of the worker, if
    this says that it has begun or ended.
    """

    text: str | None = None
    not_held: list[str] = []
    refusal: str | None = None
    signal: int = 0
    pid: int = 0


def engine_error(wanted: StructuredOutputs, error: BaseException) -> str:
    """Error text for a bug of the engine."""
    what = f"{type(error).__name__}: {error}"
    return (
        f"structured_outputs.{wanted.kind} could not be compiled, by an error of the engine "
        f"({shorten(what)}): please report it"
    )


def too_complex(wanted: StructuredOutputs, ended_by: int) -> str:
    """Error text for a compilation that was ended by one of `LIMIT_SIGNALS`."""
    if ended_by == signal.SIGPROF:
        limit = f"takes more than {CPU_LIMIT_S} s of CPU time"
    elif ended_by == signal.SIGABRT:
        limit = f"takes more than {MEMORY_LIMIT_MIB} MiB of memory"
    else:
        limit = "takes more stack than there is"
    return f"structured_outputs.{wanted.kind} is too complex: compiling it {limit}; make it simpler"


_COMMAND: Final = module_command("nanocore.engine_core.grammars.compile_server")
_ANSWER_LIMIT_S: Final = WALL_LIMIT_S + 5.0
"""Time after which the process counts as stuck and is replaced."""
_LOOK_S: Final = 1.0
"""Silence after which it is looked at: if a signal has stopped it, no answer will come."""
_NOT_BY_A_CLOCK: Final = {*LIMIT_SIGNALS} - {signal.SIGPROF}
_RETRY_AFTER_S: Final = 5.0


class CompileProcess:
    """Compiles grammars in a child process, replaced when it is gone. Any thread may use it."""

    def __init__(self, source: VocabularySource) -> None:
        self._source = source
        self._lock = threading.Lock()
        self._running: _Running | None = None
        self._is_closed = False

    def start(self) -> None:
        """Start the process, which then loads its vocabulary, unless it runs or this is closed."""
        with self._lock, suppress(EOFError):
            try:
                self._started()
            except OSError as error:
                logger.error("the compile process cannot be started: %s", error)

    def run(self, wanted: StructuredOutputs) -> tuple[str, list[str]]:
        """Compile; return llguidance's text for it and the pointers that are not held.

        Raises:
            InvalidRequestError: why it is refused; it would be again.
            EngineOverloadedError: the process is gone; another one is on its way.
            OSError: there is no descriptor for the request.
        """
        result = self._ask(wanted)
        if result.signal in _NOT_BY_A_CLOCK:
            result = self._ask(wanted)  # a refusal is kept: so not by one accident
        if result.text is not None:
            return result.text, result.not_held
        if result.refusal is not None:
            raise InvalidRequestError(result.refusal)
        if result.signal in LIMIT_SIGNALS:
            raise InvalidRequestError(too_complex(wanted, result.signal))
        raise EngineOverloadedError(
            f"structured_outputs.{wanted.kind} could not be compiled: the compile process is gone "
            "or hangs, and is restarted; try again later",
            _RETRY_AFTER_S,
        )

    def close(self) -> None:
        """End the process, whatever it does; pending calls of `run` raise. Idempotent."""
        with self._lock:
            self._is_closed = True
            self._end()

    def _ask(self, wanted: StructuredOutputs) -> CompileResult:
        """Return an empty result if the process is gone; another one is started then."""
        running = None
        ours, theirs = socket.socketpair()
        try:
            with ours:
                with theirs, self._lock:
                    running = self._started()
                    socket.send_fds(running.socket, [b"r"], [theirs.fileno()])
                return running.result(wanted, ours)
        except (OSError, EOFError, msgspec.DecodeError):
            with self._lock:
                if running is not None and running is self._running:  # nobody else found it gone
                    logger.error("the compile process is gone (exit code %s)", self._end())
            self.start()
            return CompileResult()

    def _started(self) -> _Running:
        """Return the process, started if there is none. The lock is held.

        Raises:
            EOFError: this is closed. OSError: it cannot be started.
        """
        if self._is_closed:
            raise EOFError
        if self._running is None:
            self._running = _Running(self._source)
        return self._running

    def _end(self) -> int | None:
        """End the process; return its exit code, or None if there was none. The lock is held."""
        running, self._running = self._running, None
        if running is None:
            return None
        running.process.kill()
        code = running.process.wait()
        with running.listening:  # who listens hears of the end
            running.socket.close()
        return code


class _Running:
    """A process and our end of its socket. Raises OSError if it cannot be started."""

    def __init__(self, source: VocabularySource) -> None:
        source = msgspec.structs.replace(source, name="tokenizer.json")  # a path may be no Unicode
        self.listening = threading.Lock()
        self._ended: dict[int, CompileResult] = {}
        self.socket, theirs = socket.socketpair()
        self.socket.settimeout(_ANSWER_LIMIT_S)
        try:
            with theirs, open(os.memfd_create("vocabulary"), "w+b") as file:
                file.write(msgspec.msgpack.encode(source))
                file.seek(0)
                socket.send_fds(self.socket, [b"v"], [file.fileno()])
                self.process = subprocess.Popen(
                    _COMMAND,
                    stdin=theirs.fileno(),
                    stdout=subprocess.DEVNULL,
                    # A process that forks has one thread.
                    env=os.environ | {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"},
                )
        except OSError:
            self.socket.close()
            raise

    def result(self, wanted: StructuredOutputs, end: socket.socket) -> CompileResult:
        """Return the result of a compilation. end: ours, of the request's socket pair.

        Raises:
            OSError, EOFError or msgspec.DecodeError: the process is gone or hangs.
        """
        end.settimeout(_ANSWER_LIMIT_S)
        pipe: Pipe[CompileResult] = Pipe(end, CompileResult)
        pipe.send(wanted)
        worker = self._next(pipe).pid
        try:
            return self._next(pipe)
        except EOFError:
            return self._end_of(worker)

    def _next(self, pipe: Pipe[CompileResult]) -> CompileResult:
        end_s = time.monotonic() + _ANSWER_LIMIT_S
        while not pipe.has_message(_LOOK_S):
            if time.monotonic() > end_s or self._is_stopped():
                raise TimeoutError
        return pipe.recv()

    def _end_of(self, worker: int) -> CompileResult:
        with self.listening:
            while worker not in self._ended:
                ended = Pipe[CompileResult](self.socket, CompileResult).recv()
                self._ended[ended.pid] = ended
            return self._ended.pop(worker)

    def _is_stopped(self) -> bool:
        """Whether a signal has stopped the process."""
        how = os.WSTOPPED | os.WNOHANG | os.WNOWAIT
        return os.waitid(os.P_PID, self.process.pid, how) is not None
