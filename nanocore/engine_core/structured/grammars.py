"""Grammars of requests: compiled by threads beside the step loop, and kept for those to come.

Requests are served in the order in which they came; those that want the same at once share one
compilation. Threads are less urgent than the step loop's. llguidance cannot be interrupted: one
that takes too long is answered for, and its thread replaced, a few times; it ends by itself.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from nanocore.engine_core.structured.compilation import CompiledGrammar, compile_grammar
from nanocore.engine_core.structured.grammar_cache import GrammarCache, digest
from nanocore.engine_core.structured.matcher import Compiled
from nanocore.engine_core.structured.threads import start_thread
from nanocore.engine_core.structured.vocabulary import Vocabulary
from nanocore.protocol.errors import EngineOverloadedError, InvalidRequestError, shorten
from nanocore.protocol.structured_outputs import StructuredOutputs

MAX_WAITING: Final = 256
"""Compilations that wait; beyond that, requests that need one are sent away."""
MAX_CACHE_BYTES: Final = 256 * 2**20
COMPILE_LIMIT_S: Final = 10.0
MAX_REPLACEMENTS: Final = 4
"""Threads beyond num_threads, while so many compile what takes too long."""
NICENESS: Final = 10
Compile = Callable[[Vocabulary, StructuredOutputs], CompiledGrammar]


@dataclass(eq=False)
class _Job:
    """A compilation and those who wait for it.

    end_s: monotonic, once it was begun. is_replaced: another thread works in its thread's place.
    """

    key: bytes
    wanted: StructuredOutputs
    askers: list[Callable[[Compiled], None]] = field(default_factory=list)
    end_s: float = 0.0
    is_replaced: bool = False


class Grammars:
    """A `GrammarSource` with threads of its own. Any thread may call it."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        num_threads: int = 2,
        *,
        max_waiting: int = MAX_WAITING,
        max_cache_bytes: int = MAX_CACHE_BYTES,
        compile_limit_s: float = COMPILE_LIMIT_S,
        compile_one: Compile = compile_grammar,
    ) -> None:
        self._vocabulary = vocabulary
        self._max_waiting = max_waiting
        self._compile_limit_s = compile_limit_s
        self._compile_one = compile_one
        self._cache = GrammarCache(max_cache_bytes)
        self._jobs: dict[bytes, _Job] = {}
        self._waiting: deque[_Job] = deque()
        self._running: list[_Job] = []
        self._num_late = 0
        self._num_threads = num_threads
        self._is_closed = False
        self._changed = threading.Condition()
        for _ in range(num_threads):
            start_thread(self._work, "grammars", NICENESS)
        threading.Thread(target=self._watch, name="grammars-watch", daemon=True).start()

    def find(self, wanted: StructuredOutputs) -> Compiled | None:
        """What this came to before; an EngineOverloadedError if too much waits to be compiled."""
        key = digest(wanted)
        with self._changed:
            known = self._cache.find(key)
            is_full = len(self._waiting) >= self._max_waiting
            if known is None and is_full and key not in self._jobs:
                return EngineOverloadedError(
                    f"{len(self._waiting)} structured outputs wait to be compiled, and at most "
                    f"{self._max_waiting} may: try again later"
                )
            return known

    def compile(self, wanted: StructuredOutputs, done: Callable[[Compiled], None]) -> None:
        """Begin to compile it, or join those that wait for the same; see `GrammarSource`."""
        key = digest(wanted)
        with self._changed:
            if key not in self._jobs:
                self._jobs[key] = _Job(key, wanted)
                self._waiting.append(self._jobs[key])
            self._jobs[key].askers.append(done)
            self._changed.notify_all()

    def close(self) -> None:
        """Forget what waits; threads end with what they are compiling."""
        with self._changed:
            self._is_closed = True
            self._waiting.clear()
            self._jobs.clear()
            self._changed.notify_all()

    def _work(self) -> None:
        """Of a thread: compile what waits, until there are threads enough without it."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._is_closed)
                if self._is_closed:
                    return
                job = self._waiting.popleft()
                job.end_s = time.monotonic() + self._compile_limit_s
                self._running.append(job)
                known = self._cache.find(job.key)
                self._changed.notify_all()
            result = self._compiled(job) if known is None else known
            if not self._finish(job, result):  # it was answered for, or all is closed
                with self._changed:
                    self._num_late -= 1
                    if job.is_replaced:
                        return

    def _compiled(self, job: _Job) -> CompiledGrammar | InvalidRequestError:
        try:
            grammar = self._compile_one(self._vocabulary, job.wanted)
        except InvalidRequestError as error:
            return error
        except Exception as error:
            return InvalidRequestError(
                f"structured_outputs.{job.wanted.kind} could not be compiled, by an error of the "
                f"engine ({type(error).__name__}: {shorten(str(error))}): please report it"
            )
        grammar.on_too_slow = lambda reason: self._refuse(job.key, reason)
        return grammar

    def _finish(self, job: _Job, result: CompiledGrammar | InvalidRequestError) -> bool:
        """Tell those who wait; returns False if they need not be told any more."""
        with self._changed:
            if self._is_closed or job not in self._running:
                return False
            self._running.remove(job)
            self._cache.put(job.key, result)
            del self._jobs[job.key]
        for done in job.askers:
            done(result)
        return True

    def _refuse(self, key: bytes, reason: str) -> None:
        """Of a grammar that turned out to be too slow."""
        with self._changed:
            self._cache.put(key, InvalidRequestError(reason))

    def _watch(self) -> None:
        """Answer for what takes too long, and let another thread work in its thread's place."""
        while True:
            with self._changed:
                if self._is_closed:
                    return
                end_s = min((job.end_s for job in self._running), default=None)
                wait_s = None if end_s is None else end_s - time.monotonic()
                if wait_s is None or wait_s > 0:
                    self._changed.wait(wait_s)
                    continue
                job = next(job for job in self._running if job.end_s == end_s)
                self._num_late += 1
                job.is_replaced = self._num_late <= MAX_REPLACEMENTS
            reason = (
                f"structured_outputs.{job.wanted.kind} is too complex: compiling it takes more "
                f"than {self._compile_limit_s:g} s; make it simpler"
            )
            if not self._finish(job, InvalidRequestError(reason)):
                with self._changed:  # it was done just now
                    self._num_late -= 1
                    job.is_replaced = False
            elif job.is_replaced:
                start_thread(self._work, "grammars", NICENESS)
