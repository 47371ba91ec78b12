"""The engine's side of the compile process (`compile_server`): start, requests, restart, end.

The engine and each worker hold the two ends of a socket pair, so that a result is read by the
thread that asked.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import threading
import time
from pathlib import Path
from typing import Final

import msgspec

from nanocore.engine_core.grammars.token_table import VocabularySource
from nanocore.protocol.errors import EngineOverloadedError, InvalidRequestError, shorten
from nanocore.protocol.structured_outputs import StructuredOutputs
from nanocore.system.child_process import module_command
from nanocore.worker.executors.pipe import Pipe

logger = logging.getLogger(__name__)

NUM_WORKERS: Final = 4
"""Concurrent compilations, each with a socket pair and a thread of the engine."""
CPU_LIMIT_S: Final = 0.5
MEMORY_LIMIT_MIB: Final = 512
"""Address space that a compilation may add."""
WALL_LIMIT_S: Final = 60
"""Far above the CPU limit: the machine may be busy, and compilations are the least urgent work."""
LIMIT_SIGNALS: Final = (signal.SIGPROF, signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS)
"""Signals by which a limit ends a compilation; other ends are not the grammar's fault."""


class CompileRequest(msgspec.Struct, frozen=True):
    """A structured output to compile. number: counts from 1 for each socket pair."""

    number: int
    wanted: StructuredOutputs


class CompileResult(msgspec.Struct, frozen=True, omit_defaults=True):
    """llguidance's text, or why the request is refused, or the signal that ended the process.

    number: its request's; if the process was ended just after its result, there are two of them.
    not_held: what was left out. signal: 0 if the process ended by itself.
    """

    number: int
    text: str | None = None
    not_held: list[str] = []
    refusal: str | None = None
    signal: int = 0


class CompileStart(msgspec.Struct, frozen=True):
    """The vocabulary and sockets of a compile process, as JSON on its command line.

    tokenizer: descriptor of a file in memory with the content of tokenizer.json.
    """

    tokenizer: int
    vocab_size: int
    eos_token_ids: list[int]
    sockets: list[int]
    is_urgent: bool


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
    """Compiles grammars in a child process; NUM_WORKERS threads may ask at a time.

    is_urgent: it loads its vocabulary at the usual priority; after a restart it does anyway.
    """

    def __init__(self, source: VocabularySource, is_urgent: bool = True) -> None:
        self._source = source
        self._lock = threading.Lock()
        self._asking = [threading.Lock() for _ in range(NUM_WORKERS)]
        self._running: _Running | None = None
        self._is_closed = False
        self._start(is_urgent)

    def run(self, place: int, wanted: StructuredOutputs) -> tuple[str, list[str]]:
        """Compile; return llguidance's text for it and the pointers that are not held.

        place: the asking thread's, from 0 to NUM_WORKERS - 1.

        Raises:
            InvalidRequestError: why it is refused; it would be again.
            EngineOverloadedError: the process is gone; another one is on its way.
        """
        result = self._ask(place, wanted)
        if result is not None and result.signal in _NOT_BY_A_CLOCK:
            result = self._ask(place, wanted)  # a refusal is kept: so not by one accident
        if result is not None and result.text is not None:
            return result.text, result.not_held
        if result is not None and result.refusal is not None:
            raise InvalidRequestError(result.refusal)
        if result is not None and result.signal in LIMIT_SIGNALS:
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

    def _ask(self, place: int, wanted: StructuredOutputs) -> CompileResult | None:
        """Return None if the process is gone; another one is started then."""
        with self._asking[place]:
            running = self._running
            result = None if running is None else running.ask(place, wanted)
        if result is None:
            self._restart(running)
        return result

    def _start(self, is_urgent: bool = True) -> None:
        try:
            self._running = _Running(self._source, is_urgent)
        except OSError as error:
            logger.error("the compile process cannot be started: %s", error)

    def _restart(self, gone: _Running | None) -> None:
        """Start another process, unless another thread did."""
        with self._lock:
            if self._is_closed or self._running is not gone:
                return
            code = self._end()
            logger.error("the compile process is gone (exit code %s)", code)
            self._start()

    def _end(self) -> int | None:
        """End the process; return its exit code, or None if there was none."""
        running, self._running = self._running, None
        if running is None:
            return None
        running.process.kill()
        code = running.process.wait()
        for asking, pipe in zip(self._asking, running.pipes, strict=True):
            with asking:  # whoever asked has heard of it
                pipe.close()
        return code


class _Running:
    """A process and our ends of its socket pairs. Raises OSError if it cannot be started."""

    def __init__(self, source: VocabularySource, is_urgent: bool) -> None:
        pairs = [socket.socketpair() for _ in range(NUM_WORKERS)]
        theirs = [end.fileno() for _, end in pairs]
        tokenizer = os.memfd_create("tokenizer.json")
        eos = sorted(source.eos_token_ids)
        start = CompileStart(tokenizer, source.vocab_size, eos, theirs, is_urgent)
        try:
            with open(tokenizer, "wb", closefd=False) as file:
                file.write(source.tokenizer or b"")
            self.process = subprocess.Popen(
                [*_COMMAND, msgspec.json.encode(start).decode()],
                pass_fds=[tokenizer, *theirs],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                # A process that forks has one thread.
                env=os.environ | {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"},
            )
        except OSError:
            for ours, _ in pairs:
                ours.close()
            raise
        finally:
            os.close(tokenizer)
            for _, end in pairs:
                end.close()
        for ours, _ in pairs:
            ours.settimeout(_ANSWER_LIMIT_S)
        self.pipes: list[Pipe[CompileResult]] = [Pipe(ours, CompileResult) for ours, _ in pairs]
        self._numbers = [0] * NUM_WORKERS

    def ask(self, place: int, wanted: StructuredOutputs) -> CompileResult | None:
        """Return the result of a compilation, or None if the process is gone."""
        self._numbers[place] += 1
        number, pipe = self._numbers[place], self.pipes[place]
        try:
            pipe.send(CompileRequest(number, wanted))
            end_s = time.monotonic() + _ANSWER_LIMIT_S
            while True:
                while not pipe.has_message(_LOOK_S):
                    if time.monotonic() > end_s or self._is_stopped():
                        return None
                if (result := pipe.recv()).number == number:
                    return result
        except (OSError, EOFError, msgspec.DecodeError):
            return None

    def _is_stopped(self) -> bool:
        """Whether a signal has stopped the process or one of its children."""
        pid = self.process.pid
        try:
            forked = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
            stats = [Path(f"/proc/{one}/stat").read_bytes() for one in (pid, *forked)]
        except OSError:  # one of them has just ended
            return False
        return any(stat.rpartition(b") ")[2].startswith(b"T") for stat in stats)
