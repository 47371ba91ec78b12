"""The compile process: `python -m nanocore.engine_core.grammars.compile_process`.

llguidance cannot be interrupted, and its memory has no limit. So grammars are first compiled by
workers: processes within limits, forked from one that has the vocabulary and a single thread. What
passes there costs the engine no more. A worker continues while compilations are quick and leave no
memory behind.

The engine alone starts that process, and a socket is its stdin; it ends with the engine. The first
message brings the vocabulary, as the descriptor of a file in memory. Each other one brings the end
of a socket pair for one request: a worker takes it, says which one it is, and then the result. If a
worker ends before, its parent says how. The engine's side comes first here.
"""

from __future__ import annotations

import gc
import logging
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Final, NoReturn

import msgspec

from nanocore.engine_core.grammars.compilation import compile_grammar
from nanocore.engine_core.grammars.token_table import TokenTable, VocabularySource
from nanocore.protocol.errors import EngineOverloadedError, InvalidRequestError, shorten
from nanocore.protocol.structured_outputs import StructuredOutputs
from nanocore.system.child_process import module_command, signal_at_parent_death
from nanocore.system.large_stack_threads import give_way, start_thread
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


_COMMAND: Final = module_command("nanocore.engine_core.grammars.compile_process")
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

    def start(self) -> _Running | None:
        """Return the process, started if there is none; None if it cannot be, or this is closed."""
        with self._lock:
            if self._running is None and not self._is_closed:
                try:
                    self._running = _Running(self._source)
                except (OSError, RuntimeError) as error:  # RuntimeError: no thread
                    logger.error("the compile process cannot be started: %s", error)
            return self._running

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
        if (running := self.start()) is None:
            return CompileResult()
        ours, theirs = socket.socketpair()
        try:
            with ours:
                with theirs, self._lock:  # or its socket could be closed meanwhile
                    socket.send_fds(running.socket, [b"r"], [theirs.fileno()])
                return running.result(wanted, ours)
        except (OSError, EOFError, msgspec.DecodeError):
            with self._lock:
                if self._running is running:  # no other thread has found it gone
                    logger.error("the compile process is gone (exit code %s)", self._end())
            self.start()
            return CompileResult()

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


def _start(stdin: int) -> subprocess.Popen[bytes]:
    """Start a process in a thread that lives as long: the kernel ends the one with the other."""
    started: Future[subprocess.Popen[bytes]] = Future()

    def run() -> None:
        try:
            process = subprocess.Popen(
                _COMMAND,
                stdin=stdin,
                stdout=subprocess.DEVNULL,
                # A process that forks has one thread.
                env=os.environ | {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"},
            )
        except OSError as error:
            started.set_exception(error)
            return
        started.set_result(process)
        process.wait()

    threading.Thread(target=run, name="compile-process", daemon=True).start()
    return started.result()


class _Running:
    """A process and our end of its socket. Raises OSError or RuntimeError if it does not start."""

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
                self.process = _start(theirs.fileno())
        except (OSError, RuntimeError):
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


_QUICK_S: Final = 0.02
"""Longer compilations continue at low priority."""
_MAX_GROWTH_MIB: Final = 32
"""Limit of resident memory that a worker gains before it is replaced."""
_ENGINE_IS_GONE: Final = 3
"""Exit code of a worker when the engine is gone."""
_NO_VOCABULARY: Final = 4


def main() -> None:
    signal_at_parent_death(signal.SIGKILL)  # the socket's end comes to nobody who is stopped
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    engine = socket.socket(fileno=0)
    _, [vocabulary_file], *_ = socket.recv_fds(engine, 1, 1)
    with open(vocabulary_file, "rb") as file:
        source = msgspec.msgpack.decode(file.read(), type=VocabularySource)
    try:
        vocabulary = TokenTable.load(source)
        del source  # tens of megabytes, perhaps
    except InvalidRequestError:
        sys.exit(_NO_VOCABULARY)  # the engine finds the same, and says so
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    gc.freeze()
    _keep_workers(vocabulary, engine)


def _keep_workers(vocabulary: TokenTable, engine: socket.socket) -> None:
    """Replace workers that end, and tell the engine how they did, until the engine is gone."""
    pipe: Pipe[CompileResult] = Pipe(engine, CompileResult)
    own_pid, num_workers = os.getpid(), 0
    while True:
        for _ in range(num_workers, NUM_WORKERS):
            if not os.fork():
                _work(vocabulary, engine, own_pid)
        num_workers = NUM_WORKERS
        pid, status = os.waitpid(-1, os.WUNTRACED)
        if os.WIFSTOPPED(status):
            os.kill(pid, signal.SIGKILL)
            continue
        num_workers -= 1
        code = os.waitstatus_to_exitcode(status)
        if code == _ENGINE_IS_GONE:
            return
        if code:
            pipe.send(CompileResult(pid=pid, signal=max(-code, 0)))


def _work(vocabulary: TokenTable, engine: socket.socket, parent: int) -> NoReturn:
    """Compile in a forked process until a compilation was slow or left memory behind."""
    try:
        signal_at_parent_death(signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(_ENGINE_IS_GONE)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # of what ends it, the result tells
        most_pages = _pages()[1] + _MAX_GROWTH_MIB * 2**20 // resource.getpagesize()
        while True:
            _, descriptors, *_ = socket.recv_fds(engine, 1, 1)
            if not descriptors:
                os._exit(_ENGINE_IS_GONE)
            with socket.socket(fileno=descriptors[0]) as end:
                pipe: Pipe[StructuredOutputs] = Pipe(end, StructuredOutputs)
                pipe.send(CompileResult(pid=os.getpid()))
                result, is_quick = _try(vocabulary, pipe.recv())
                pipe.send(result)
            if not is_quick or _pages()[1] > most_pages:
                os._exit(0)
    finally:
        os._exit(1)


def _try(vocabulary: TokenTable, wanted: StructuredOutputs) -> tuple[CompileResult, bool]:
    """Return a request's result, and whether it was quick; may end the process instead."""
    results: list[CompileResult] = []
    thread = start_thread(lambda: results.append(_compile(vocabulary, wanted)), "request")
    thread.join(_QUICK_S)
    is_quick = not thread.is_alive()
    if not is_quick:
        give_way(thread)
        thread.join()
    # From here on nothing ends it: a result is sent whole.
    for timer in (signal.ITIMER_REAL, signal.ITIMER_PROF):
        signal.setitimer(timer, 0)
    _limit_memory(resource.getrlimit(resource.RLIMIT_AS)[1])
    return results[0], is_quick


def _compile(vocabulary: TokenTable, wanted: StructuredOutputs) -> CompileResult:
    """Compile within limits, beyond which this process ends."""
    signal.setitimer(signal.ITIMER_REAL, WALL_LIMIT_S)
    signal.setitimer(signal.ITIMER_PROF, CPU_LIMIT_S)
    _limit_memory(_pages()[0] * resource.getpagesize() + MEMORY_LIMIT_MIB * 2**20)
    try:
        text, grammar = compile_grammar(vocabulary, wanted)
        return CompileResult(text=text, not_held=[*grammar.not_held])
    except InvalidRequestError as error:
        return CompileResult(refusal=str(error))
    except MemoryError:
        return CompileResult(signal=signal.SIGABRT)
    except BaseException as error:
        return CompileResult(refusal=engine_error(wanted, error))


def _limit_memory(num_bytes: int) -> None:
    with suppress(ValueError):  # the system's own limit is lower, and stays
        resource.setrlimit(
            resource.RLIMIT_AS, (num_bytes, resource.getrlimit(resource.RLIMIT_AS)[1])
        )


def _pages() -> list[int]:
    """Pages of this process: of its address space, and resident."""
    return [int(number) for number in Path("/proc/self/statm").read_text().split()[:2]]


if __name__ == "__main__":
    main()
