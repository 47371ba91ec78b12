"""The compile process: `python -m nanocore.engine_core.grammars.compile_server`.

Started by the engine alone; it ends with the engine. llguidance cannot be interrupted, and its
memory has no limit. So grammars are first compiled by workers: processes within limits, forked from
this one, which has the vocabulary and a single thread. A worker continues while compilations are
quick and leave no memory behind. What passes here costs the engine no more than it did here.
"""

from __future__ import annotations

import gc
import os
import resource
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
    NUM_WORKERS,
    WALL_LIMIT_S,
    CompileResult,
    engine_error,
)
from nanocore.engine_core.grammars.token_table import TokenTable, VocabularySource
from nanocore.protocol.errors import InvalidRequestError
from nanocore.protocol.structured_outputs import StructuredOutputs
from nanocore.system.child_process import signal_at_parent_death
from nanocore.system.large_stack_threads import give_way, start_thread
from nanocore.worker.executors.pipe import Pipe

_QUICK_S: Final = 0.02
"""Longer compilations continue at low priority."""
_MAX_GROWTH_MIB: Final = 32
"""Limit of resident memory that a worker gains before it is replaced."""
_ENGINE_IS_GONE: Final = 3
"""Exit code of a worker when the engine is gone."""
_NO_VOCABULARY: Final = 4


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    engine = socket.socket(fileno=0)
    _, [vocabulary_file], *_ = socket.recv_fds(engine, 1, 1)
    with open(vocabulary_file, "rb") as file:
        source = msgspec.msgpack.decode(file.read(), type=VocabularySource)
    try:
        vocabulary = TokenTable.load(source)
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
