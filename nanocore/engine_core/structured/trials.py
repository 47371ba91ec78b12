"""`python -m nanocore.engine_core.structured.trials START`: tries grammars, and may be killed.

Started by the engine and by nobody else; it ends with the engine. llguidance cannot be interrupted,
and its memory has no limit: so each trial is a process of its own, forked from one that has the
vocabulary and a single thread. What passes here costs the engine no more than it did here.
"""

from __future__ import annotations

import gc
import mmap
import os
import resource
import signal
import socket
import sys
from pathlib import Path
from typing import Final, NoReturn

import msgspec

from nanocore.engine_core.structured.compilation import try_grammar
from nanocore.engine_core.structured.threads import start_thread
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
from nanocore.system.lifeline import signal_at_parent_death
from nanocore.worker.executors.pipe import Pipe

_NICENESS: Final = 5
_ENGINE_IS_GONE: Final = 3
"""A trial's exit code."""
_NO_VOCABULARY: Final = 4


def main() -> None:
    """Serve the engine until it is gone."""
    start = msgspec.json.decode(sys.argv[1], type=TrialStart)
    signal_at_parent_death(signal.SIGKILL)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    os.nice(_NICENESS)
    try:
        vocabulary = Vocabulary.load(Path(start.folder), start.vocab_size, start.eos_token_ids)
    except InvalidRequestError:
        sys.exit(_NO_VOCABULARY)  # the engine found the same, and says so
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    gc.freeze()
    pipes: list[Pipe[Trial]] = [Pipe(socket.socket(fileno=fd), Trial) for fd in start.sockets]
    Trials(vocabulary, pipes).run()


class Trials:
    """One process for each pipe, waiting for its trial or at it; a new one when it ends."""

    def __init__(self, vocabulary: Vocabulary, pipes: list[Pipe[Trial]]) -> None:
        self._vocabulary = vocabulary
        self._pipes = pipes
        # Shared with the processes: the number of the trial that each began, or 0.
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
            # Whoever dies before a trial is begun leaves it to the next.
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
            self._try_one(place)
        finally:
            os._exit(1)

    def _try_one(self, place: int) -> NoReturn:
        """Of a forked process: one trial, and the end."""
        signal_at_parent_death(signal.SIGKILL)
        if os.getppid() != self._pid:
            os._exit(_ENGINE_IS_GONE)
        pipe = self._pipes[place]
        try:
            trial = pipe.recv()
        except EOFError:
            os._exit(_ENGINE_IS_GONE)
        self._begun[place] = trial.number
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 2)  # of what ends it, the verdict tells
        verdicts: list[Verdict] = []
        start_thread(lambda: verdicts.append(_verdict(self._vocabulary, trial)), "trial").join()
        # From here on nothing ends it: a verdict is sent whole.
        signal.setitimer(signal.ITIMER_REAL, 0)
        for what in (resource.RLIMIT_CPU, resource.RLIMIT_AS):
            _limit(what, resource.getrlimit(what)[1])
        try:
            pipe.send(verdicts[0])
        except OSError:
            os._exit(_ENGINE_IS_GONE)
        os._exit(0)


def _verdict(vocabulary: Vocabulary, trial: Trial) -> Verdict:
    """Of a trial, within limits from now on: beyond them its process ends here."""
    signal.setitimer(signal.ITIMER_REAL, WALL_LIMIT_S)
    _limit(resource.RLIMIT_CPU, CPU_LIMIT_S)
    num_pages = int(Path("/proc/self/statm").read_text().split()[0])
    _limit(resource.RLIMIT_AS, num_pages * resource.getpagesize() + MEMORY_LIMIT_MIB * 2**20)
    try:
        return Verdict(trial.number, text=try_grammar(vocabulary, trial.wanted))
    except InvalidRequestError as error:
        return Verdict(trial.number, refusal=str(error))
    except MemoryError:
        return Verdict(trial.number, signal=signal.SIGABRT)
    except BaseException as error:
        what = f"{type(error).__name__}: {error}"
        return Verdict(trial.number, refusal=engine_error(trial.wanted, what))


def _limit(what: int, most: int) -> None:
    resource.setrlimit(what, (most, resource.getrlimit(what)[1]))


if __name__ == "__main__":
    main()
