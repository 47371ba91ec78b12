"""The trial process as the engine sees it: started, asked by several threads, started anew, ended.

See `trials`. The engine and each place for a trial hold the two ends of a socket pair, so that a
verdict is read by the thread that asked.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Collection
from pathlib import Path
from typing import Final

import msgspec

from nanocore.engine_core.structured.trial_messages import (
    NUM_TRIALS,
    VERDICT_SIGNALS,
    WALL_LIMIT_S,
    Trial,
    TrialStart,
    Verdict,
    too_complex,
)
from nanocore.protocol.errors import EngineOverloadedError, InvalidRequestError
from nanocore.protocol.structured_outputs import StructuredOutputs
from nanocore.system.child_process import module_command
from nanocore.worker.executors.pipe import Pipe

logger = logging.getLogger(__name__)

_COMMAND: Final = module_command("nanocore.engine_core.structured.trials")
_ANSWER_LIMIT_S: Final = WALL_LIMIT_S + 5.0
"""Beyond that the process is stuck, and another one is started."""
_LOOK_S: Final = 1.0
"""Silence after which it is looked at: if a signal has stopped it, no answer will come."""
_NOT_BY_A_CLOCK: Final = {*VERDICT_SIGNALS} - {signal.SIGPROF}
_RETRY_AFTER_S: Final = 5.0


class TrialProcess:
    """Tries grammars for a model folder's vocabulary; NUM_TRIALS threads may ask at a time."""

    def __init__(self, folder: Path, vocab_size: int, eos_token_ids: Collection[int]) -> None:
        self._arguments = folder, vocab_size, sorted(eos_token_ids)
        self._lock = threading.Lock()
        self._asking = [threading.Lock() for _ in range(NUM_TRIALS)]
        self._running: _Running | None = None
        self._is_closed = False
        self._start()

    @property
    def pid(self) -> int | None:
        """Of the process; None if there is none."""
        running = self._running
        return None if running is None else running.process.pid

    def run(self, place: int, wanted: StructuredOutputs) -> tuple[str, list[str]]:
        """(llguidance's text for it, what was left out).

        place: the asking thread's, from 0 to NUM_TRIALS - 1.

        Raises:
            InvalidRequestError: why it is refused; it would be again.
            EngineOverloadedError: the process is gone; another one is on its way.
        """
        verdict = self._verdict(place, wanted)
        if verdict is not None and verdict.signal in _NOT_BY_A_CLOCK:
            verdict = self._verdict(place, wanted)  # a refusal is kept: so not by one accident
        if verdict is not None and verdict.text is not None:
            return verdict.text, verdict.not_held
        if verdict is not None and verdict.refusal is not None:
            raise InvalidRequestError(verdict.refusal)
        if verdict is not None and verdict.signal in VERDICT_SIGNALS:
            raise InvalidRequestError(too_complex(wanted, verdict.signal))
        raise EngineOverloadedError(
            f"structured_outputs.{wanted.kind} could not be compiled: the process for that is "
            "gone or stuck, and is started again; try again later",
            _RETRY_AFTER_S,
        )

    def close(self) -> None:
        """End it, whatever it does; those who ask hear that it is gone. Idempotent."""
        with self._lock:
            self._is_closed = True
            self._end()

    def _verdict(self, place: int, wanted: StructuredOutputs) -> Verdict | None:
        """None if the process is gone; then another one is started."""
        with self._asking[place]:
            running = self._running
            verdict = None if running is None else running.ask(place, wanted)
        if verdict is None:
            self._restart(running)
        return verdict

    def _start(self) -> None:
        try:
            self._running = _Running(*self._arguments)
        except OSError as error:
            logger.error("the process that tries structured outputs cannot be started: %s", error)

    def _restart(self, gone: _Running | None) -> None:
        """Another one in its place, unless another thread saw to it."""
        with self._lock:
            if self._is_closed or self._running is not gone:
                return
            code = self._end()
            logger.error("the process that tries structured outputs is gone (exit code %s)", code)
            self._start()

    def _end(self) -> int | None:
        """End the process; returns how it ended, None if there was none."""
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

    def __init__(self, folder: Path, vocab_size: int, eos_token_ids: list[int]) -> None:
        pairs = [socket.socketpair() for _ in range(NUM_TRIALS)]
        theirs = [end.fileno() for _, end in pairs]
        start = TrialStart(vocab_size, eos_token_ids, theirs)
        try:
            self.process = subprocess.Popen(
                [*_COMMAND, msgspec.json.encode(start).decode(), str(folder)],
                pass_fds=theirs,
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
            for _, end in pairs:
                end.close()
        for ours, _ in pairs:
            ours.settimeout(_ANSWER_LIMIT_S)
        self.pipes: list[Pipe[Verdict]] = [Pipe(ours, Verdict) for ours, _ in pairs]
        self._numbers = [0] * NUM_TRIALS

    def ask(self, place: int, wanted: StructuredOutputs) -> Verdict | None:
        """The verdict of a trial; None if the process is gone."""
        self._numbers[place] += 1
        number, pipe = self._numbers[place], self.pipes[place]
        try:
            pipe.send(Trial(number, wanted))
            end_s = time.monotonic() + _ANSWER_LIMIT_S
            while True:
                while not pipe.has_message(_LOOK_S):
                    if time.monotonic() > end_s or self._is_stopped():
                        return None
                if (verdict := pipe.recv()).number == number:
                    return verdict
        except (OSError, EOFError, msgspec.DecodeError):
            return None

    def _is_stopped(self) -> bool:
        """Whether a signal has stopped the process, or one that it has forked."""
        pid = self.process.pid
        try:
            forked = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
            stats = [Path(f"/proc/{one}/stat").read_bytes() for one in (pid, *forked)]
        except OSError:  # one of them has just ended
            return False
        return any(stat.rpartition(b") ")[2].startswith(b"T") for stat in stats)
