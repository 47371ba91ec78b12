"""The compile process: `python -m nanocore.engine_core.grammars.compile_server START`.

Started by the engine alone; it ends with the engine. llguidance cannot be interrupted, and its
memory has no limit. So grammars are first compiled in processes within limits, forked from one that
has the vocabulary and a single thread. A forked process continues while compilations are quick and
leave no memory behind. What passes here costs the engine no more than it did here.
"""

from __future__ import annotations

import gc
import mmap
import os
import resource
import select
import signal
import socket
import sys
from contextlib import suppress
from pathlib import Path
from typing import Final, NoReturn

import msgspec

from nanocore.engine_core.grammars.compilation import compile_grammar
from nanocore.engine_core.grammars.compile_process import (
    CPU_LIMIT_S,
    MEMORY_LIMIT_MIB,
    WALL_LIMIT_S,
    CompileRequest,
    CompileResult,
    CompileStart,
    engine_error,
)
from nanocore.engine_core.grammars.token_table import TokenTable, VocabularySource
from nanocore.protocol.errors import InvalidRequestError
from nanocore.system.child_process import signal_at_parent_death
from nanocore.system.large_stack_threads import give_way, start_thread
from nanocore.worker.executors.pipe import Pipe

_QUICK_S: Final = 0.02
"""Longer compilations continue at low priority."""
_MAX_GROWTH_MIB: Final = 32
"""Limit of resident memory that a process gains before it is replaced."""
_ENGINE_IS_GONE: Final = 3
"""Exit code of a forked process when the engine is gone."""
_NO_VOCABULARY: Final = 4
_READING: Final = 2**63
"""In place of a request's number: the request is being read, and would be lost with its process."""


def main() -> None:
    start = msgspec.json.decode(sys.argv[1], type=CompileStart)
    signal_at_parent_death(signal.SIGKILL)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    vocabulary = _load(start)
    if vocabulary is None:
        sys.exit(_NO_VOCABULARY)  # the engine finds the same, and says so
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    gc.freeze()
    pipes: list[Pipe[CompileRequest]] = [
        Pipe(socket.socket(fileno=fd), CompileRequest) for fd in start.sockets
    ]
    CompileWorkers(vocabulary, pipes).run()


def _load(start: CompileStart) -> TokenTable | None:
    """Load the vocabulary in a thread, whose priority can be lowered without the process's."""
    with open(start.tokenizer, "rb") as file:
        file.seek(0)  # where the engine has left it
        source = VocabularySource(
            file.read(), "tokenizer.json", start.vocab_size, start.eos_token_ids
        )
    loaded: list[TokenTable] = []

    def load() -> None:
        with suppress(InvalidRequestError):
            loaded.append(TokenTable.load(source))

    thread = start_thread(load, "vocabulary")
    if not start.is_urgent:
        give_way(thread)
    thread.join()
    return loaded[0] if loaded else None


class CompileWorkers:
    """One forked process for each pipe, which waits or compiles; replaced when it ends."""

    def __init__(self, vocabulary: TokenTable, pipes: list[Pipe[CompileRequest]]) -> None:
        self._vocabulary = vocabulary
        self._pipes = pipes
        # Shared with the processes: the number of the request that each began, _READING, or 0.
        self._begun = memoryview(mmap.mmap(-1, 8 * len(pipes))).cast("Q")
        self._pid = os.getpid()
        self._running: dict[int, int] = {}

    def run(self) -> None:
        """Serve until the engine is gone."""
        for place in range(len(self._pipes)):
            self._fork(place)
        while True:
            pid, status = os.wait()
            place = self._running.pop(pid)
            code = os.waitstatus_to_exitcode(status)
            if code == _ENGINE_IS_GONE:
                return
            # A process that dies before it begins a request leaves it to the next; one half read
            # cannot be read again, so that the engine has to see the end of all this.
            if self._begun[place] == _READING:
                return
            if code != 0 and self._begun[place]:
                try:
                    self._pipes[place].send(CompileResult(self._begun[place], signal=max(-code, 0)))
                except OSError:
                    return
            self._fork(place)

    def _fork(self, place: int) -> None:
        self._begun[place] = 0
        pid = os.fork()
        if pid:
            self._running[pid] = place
            return
        try:
            self._serve(place)
        finally:
            os._exit(1)

    def _serve(self, place: int) -> NoReturn:
        """Compile in a forked process until a compilation was slow or left memory behind."""
        signal_at_parent_death(signal.SIGKILL)
        if os.getppid() != self._pid:
            os._exit(_ENGINE_IS_GONE)
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 2)  # of what ends it, the result tells
        most_pages = _pages()[1] + _MAX_GROWTH_MIB * 2**20 // resource.getpagesize()
        while True:
            select.select([self._pipes[place]], [], [])
            self._begun[place] = _READING
            try:
                request = self._pipes[place].recv()
            except EOFError:
                os._exit(_ENGINE_IS_GONE)
            self._begun[place] = request.number
            result, is_quick = self._try(request)
            try:
                self._pipes[place].send(result)
            except OSError:
                os._exit(_ENGINE_IS_GONE)
            self._begun[place] = 0
            if not is_quick or _pages()[1] > most_pages:
                os._exit(0)

    def _try(self, request: CompileRequest) -> tuple[CompileResult, bool]:
        """Return a request's result, and whether it was quick; may end the process instead."""
        results: list[CompileResult] = []
        thread = start_thread(
            lambda: results.append(_compile(self._vocabulary, request)), "request"
        )
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


def _compile(vocabulary: TokenTable, request: CompileRequest) -> CompileResult:
    """Compile within limits, beyond which this process ends."""
    signal.setitimer(signal.ITIMER_REAL, WALL_LIMIT_S)
    signal.setitimer(signal.ITIMER_PROF, CPU_LIMIT_S)
    _limit_memory(_pages()[0] * resource.getpagesize() + MEMORY_LIMIT_MIB * 2**20)
    try:
        text, grammar = compile_grammar(vocabulary, request.wanted)
        return CompileResult(request.number, text=text, not_held=[*grammar.not_held])
    except InvalidRequestError as error:
        return CompileResult(request.number, refusal=str(error))
    except MemoryError:
        return CompileResult(request.number, signal=signal.SIGABRT)
    except BaseException as error:
        return CompileResult(request.number, refusal=engine_error(request.wanted, error))


def _limit_memory(num_bytes: int) -> None:
    most = resource.getrlimit(resource.RLIMIT_AS)[1]
    if most != resource.RLIM_INFINITY:
        num_bytes = most if num_bytes == resource.RLIM_INFINITY else min(num_bytes, most)
    resource.setrlimit(resource.RLIMIT_AS, (num_bytes, most))


def _pages() -> list[int]:
    """Pages of this process: of its address space, and resident."""
    return [int(number) for number in Path("/proc/self/statm").read_text().split()[:2]]


if __name__ == "__main__":
    main()
