"""`python -m nanocore.engine_core.structured.trials START FOLDER`: tries grammars, may be killed.

Started by the engine and by nobody else; it ends with the engine. llguidance cannot be interrupted,
and its memory has no limit: so trials are done by processes within limits, forked from one that has
the vocabulary and a single thread. Such a process goes on to the next trial while trials are quick
and leave nothing behind. What passes here costs the engine no more than it did here.
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
from pathlib import Path
from typing import Final, NoReturn

import msgspec

from nanocore.engine_core.structured.compilation import try_grammar
from nanocore.engine_core.structured.threads import give_way, start_thread
from nanocore.engine_core.structured.trial_messages import (
    CPU_LIMIT_S,
    MEMORY_LIMIT_MIB,
    WALL_LIMIT_S,
    Trial,
    TrialStart,
    Verdict,
    engine_error,
)
from nanocore.engine_core.structured.vocabulary import Vocabulary
from nanocore.protocol.errors import InvalidRequestError
from nanocore.system.child_process import signal_at_parent_death
from nanocore.worker.executors.pipe import Pipe

_QUICK_S: Final = 0.02
"""What takes longer gives way to whatever else the machine does."""
_MAX_GROWTH_MIB: Final = 32
"""Of resident memory, beyond what a process began with; then there is a new one."""
_ENGINE_IS_GONE: Final = 3
"""A trial's exit code."""
_NO_VOCABULARY: Final = 4
_READING: Final = 2**63
"""In the place of a trial's number: it is being read, and would be lost with its process."""


def main() -> None:
    """Serve the engine until it is gone."""
    start = msgspec.json.decode(sys.argv[1], type=TrialStart)
    signal_at_parent_death(signal.SIGKILL)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    try:
        vocabulary = Vocabulary.load(Path(sys.argv[2]), start.vocab_size, start.eos_token_ids)
    except InvalidRequestError:
        sys.exit(_NO_VOCABULARY)  # the engine found the same, and says so
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    gc.freeze()
    pipes: list[Pipe[Trial]] = [Pipe(socket.socket(fileno=fd), Trial) for fd in start.sockets]
    Trials(vocabulary, pipes).run()


class Trials:
    """One process for each pipe, waiting for a trial or at it; a new one when it ends."""

    def __init__(self, vocabulary: Vocabulary, pipes: list[Pipe[Trial]]) -> None:
        self._vocabulary = vocabulary
        self._pipes = pipes
        # Shared with the processes: the number of the trial that each began, _READING, or 0.
        self._begun = memoryview(mmap.mmap(-1, 8 * len(pipes))).cast("Q")
        self._pid = os.getpid()
        self._running: dict[int, int] = {}

    def run(self) -> None:
        """Until the engine is gone."""
        for place in range(len(self._pipes)):
            self._fork(place)
        while True:
            pid, status = os.wait()
            place = self._running.pop(pid)
            code = os.waitstatus_to_exitcode(status)
            if code == _ENGINE_IS_GONE:
                return
            # Whoever dies before a trial is begun leaves it to the next; but one that is half read
            # cannot be read again, so that the engine has to see the end of all this.
            if self._begun[place] == _READING:
                return
            if code != 0 and self._begun[place]:
                try:
                    self._pipes[place].send(Verdict(self._begun[place], signal=max(-code, 0)))
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
        """Of a forked process: trials, until one was not quick or left memory behind."""
        signal_at_parent_death(signal.SIGKILL)
        if os.getppid() != self._pid:
            os._exit(_ENGINE_IS_GONE)
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 2)  # of what ends it, the verdict tells
        most_pages = _pages()[1] + _MAX_GROWTH_MIB * 2**20 // resource.getpagesize()
        while True:
            select.select([self._pipes[place]], [], [])
            self._begun[place] = _READING
            try:
                trial = self._pipes[place].recv()
            except EOFError:
                os._exit(_ENGINE_IS_GONE)
            self._begun[place] = trial.number
            verdict, is_quick = self._try(trial)
            try:
                self._pipes[place].send(verdict)
            except OSError:
                os._exit(_ENGINE_IS_GONE)
            self._begun[place] = 0
            if not is_quick or _pages()[1] > most_pages:
                os._exit(0)

    def _try(self, trial: Trial) -> tuple[Verdict, bool]:
        """(its verdict, whether it was quick). Beyond the limits this process ends."""
        verdicts: list[Verdict] = []
        thread = start_thread(lambda: verdicts.append(_verdict(self._vocabulary, trial)), "trial")
        thread.join(_QUICK_S)
        is_quick = not thread.is_alive()
        if not is_quick:
            give_way(thread)
            thread.join()
        # From here on nothing ends it: a verdict is sent whole.
        for timer in (signal.ITIMER_REAL, signal.ITIMER_PROF):
            signal.setitimer(timer, 0)
        _limit_memory(resource.getrlimit(resource.RLIMIT_AS)[1])
        return verdicts[0], is_quick


def _verdict(vocabulary: Vocabulary, trial: Trial) -> Verdict:
    """Of a trial, within limits from now on: beyond them its process ends here."""
    signal.setitimer(signal.ITIMER_REAL, WALL_LIMIT_S)
    signal.setitimer(signal.ITIMER_PROF, CPU_LIMIT_S)
    _limit_memory(_pages()[0] * resource.getpagesize() + MEMORY_LIMIT_MIB * 2**20)
    try:
        text, not_held = try_grammar(vocabulary, trial.wanted)
        return Verdict(trial.number, text=text, not_held=not_held)
    except InvalidRequestError as error:
        return Verdict(trial.number, refusal=str(error))
    except MemoryError:
        return Verdict(trial.number, signal=signal.SIGABRT)
    except BaseException as error:
        what = f"{type(error).__name__}: {error}"
        return Verdict(trial.number, refusal=engine_error(trial.wanted, what))


def _limit_memory(num_bytes: int) -> None:
    most = resource.getrlimit(resource.RLIMIT_AS)[1]
    if most != resource.RLIM_INFINITY:
        num_bytes = most if num_bytes == resource.RLIM_INFINITY else min(num_bytes, most)
    resource.setrlimit(resource.RLIMIT_AS, (num_bytes, most))


def _pages() -> list[int]:
    """Of this process: of its address space, and resident ones."""
    return [int(number) for number in Path("/proc/self/statm").read_text().split()[:2]]


if __name__ == "__main__":
    main()
