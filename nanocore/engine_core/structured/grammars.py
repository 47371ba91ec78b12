"""Grammars of requests: tried by a process, compiled by threads, and kept for those to come.

Clients are served by turns, each in the order of its requests; those that want the same at once
share one compilation. llguidance cannot be interrupted: so whatever comes is tried by a process
that may be killed (`trials`), and the engine compiles only what that took little for.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Final, Protocol

from nanocore.engine_core.structured.compilation import CompiledGrammar, compile_text
from nanocore.engine_core.structured.fair_queue import FairQueue
from nanocore.engine_core.structured.followed_grammar import followed
from nanocore.engine_core.structured.grammar_cache import GrammarCache, digest
from nanocore.engine_core.structured.matcher import Compiled
from nanocore.engine_core.structured.threads import give_way, join_threads, start_thread
from nanocore.engine_core.structured.trial_messages import NUM_TRIALS, engine_error
from nanocore.engine_core.structured.vocabulary import Vocabulary
from nanocore.protocol.errors import EngineOverloadedError, InvalidRequestError
from nanocore.protocol.structured_outputs import StructuredOutputs

MAX_WAITING: Final = 256
"""Compilations that wait for one client; beyond that, its requests that need one are sent away."""
MAX_IN_HAND: Final = 2
"""Compilations of one client at a time: long ones of its own delay no other client."""
MAX_CACHE_BYTES: Final = 256 * 2**20
_QUICK_S: Final = 0.05
"""What took longer to try is compiled with what CPU time others leave."""
_RETRY_AFTER_S: Final = 5.0
_END_LIMIT_S: Final = 5.0


class TrialRunner(Protocol):
    """Tries what requests want, for several threads; see `TrialProcess`."""

    def run(self, place: int, wanted: StructuredOutputs) -> tuple[str, list[str]]: ...

    def close(self) -> None: ...


@dataclass(eq=False)
class _Asker:
    client: int
    done: Callable[[Compiled], None]
    output: Sequence[int]


@dataclass(eq=False)
class _Job:
    """A compilation and those who wait for it."""

    key: bytes
    wanted: StructuredOutputs
    askers: list[_Asker] = field(default_factory=list)
    is_begun: bool = False


class Grammars:
    """A `GrammarSource` with threads of its own. Any thread may call it.

    trials: closed with it.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        trials: TrialRunner,
        num_threads: int = NUM_TRIALS,
        *,
        max_waiting: int = MAX_WAITING,
        max_cache_bytes: int = MAX_CACHE_BYTES,
    ) -> None:
        self._vocabulary = vocabulary
        self._trials = trials
        self._max_waiting = max_waiting
        self._cache = GrammarCache(max_cache_bytes)
        self._jobs: dict[bytes, _Job] = {}
        self._waiting: FairQueue[_Job] = FairQueue(MAX_IN_HAND)
        self._is_closed = False
        self._changed = threading.Condition()
        self._threads = [
            start_thread(partial(self._work, place), f"grammars-{place}")
            for place in range(num_threads)
        ]

    def find(self, wanted: StructuredOutputs, client: int = 0) -> Compiled | None:
        """What this came to before; an EngineOverloadedError if the client waits for too many."""
        key = digest(wanted)
        with self._changed:
            known = self._cache.find(key)
            num_waiting = self._waiting.count(client)
            if known is None and num_waiting >= self._max_waiting and key not in self._jobs:
                return EngineOverloadedError(
                    f"{num_waiting} structured outputs of this session wait to be compiled, and at "
                    f"most {self._max_waiting} may: try again later"
                )
            return known

    def compile(
        self,
        wanted: StructuredOutputs,
        done: Callable[[Compiled], None],
        client: int = 0,
        output: Sequence[int] = (),
    ) -> Callable[[], None]:
        """Begin to compile it, or join those that wait for the same; see `GrammarSource`."""
        key, asker = digest(wanted), _Asker(client, done, output)
        with self._changed:
            job = self._jobs.setdefault(key, _Job(key, wanted))
            job.askers.append(asker)
            if not job.is_begun:
                self._waiting.add(client, job)
            self._changed.notify_all()
        return partial(self._withdraw, job, asker)

    def close(self) -> bool:
        """Forget what waits, and end the process; see `GrammarSource`. Idempotent."""
        with self._changed:
            self._is_closed = True
            self._waiting.clear()
            self._jobs.clear()
            self._changed.notify_all()
        self._trials.close()
        return join_threads(self._threads, _END_LIMIT_S)

    def _withdraw(self, job: _Job, asker: _Asker) -> None:
        """What is tried already goes on, and is kept for others."""
        with self._changed:
            if asker not in job.askers:
                return
            job.askers.remove(asker)
            if all(other.client != asker.client for other in job.askers):
                self._waiting.remove(asker.client, job)
            if not job.askers and not job.is_begun:
                self._jobs.pop(job.key, None)

    def _work(self, place: int) -> None:
        """Of a thread: compile what waits."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._is_closed)
                if self._is_closed:
                    return
                client, job = self._waiting.pop()
                job.is_begun = True
                for asker in job.askers:
                    self._waiting.remove(asker.client, job)
                result: Compiled | None = self._cache.find(job.key)
            self._finish(client, job, result or self._compiled(place, job))

    def _compiled(
        self, place: int, job: _Job
    ) -> CompiledGrammar | InvalidRequestError | EngineOverloadedError:
        try:
            start_s = time.monotonic()
            text, not_held = self._trials.run(place, job.wanted)
            if time.monotonic() - start_s <= _QUICK_S:
                grammar = compile_text(self._vocabulary, text)
            else:
                grammar = self._compiled_aside(text)
        except InvalidRequestError as error:
            return InvalidRequestError(str(error))  # a new one: without what it passed on its way
        except EngineOverloadedError as error:
            return EngineOverloadedError(str(error), error.retry_after_s)
        except (MemoryError, OSError) as error:  # may be over soon, so it is not kept
            what = f"structured_outputs.{job.wanted.kind} could not be compiled"
            return EngineOverloadedError(f"{what} ({error!r}): try again later", _RETRY_AFTER_S)
        except Exception as error:
            what = f"{type(error).__name__}: {error}"
            return InvalidRequestError(engine_error(job.wanted, what))
        grammar.not_held = not_held
        grammar.on_too_slow = partial(self._refuse, job.key)
        return grammar

    def _compiled_aside(self, text: str) -> CompiledGrammar:
        """In a thread that gives way to all others, if one is to be had."""
        compiled: Future[CompiledGrammar] = Future()

        def run() -> None:
            try:
                compiled.set_result(compile_text(self._vocabulary, text))
            except BaseException as error:
                compiled.set_exception(error)

        try:
            thread = start_thread(run, "grammar")
        except RuntimeError:
            return compile_text(self._vocabulary, text)
        give_way(thread)
        return compiled.result()

    def _finish(self, client: int, job: _Job, result: Compiled) -> None:
        """Tell those who wait. client: whose turn it was."""
        with self._changed:
            self._waiting.done(client)
            self._changed.notify_all()
            if self._is_closed:
                return
            if isinstance(result, CompiledGrammar | InvalidRequestError):
                self._cache.put(job.key, result)
            del self._jobs[job.key]
            askers, job.askers = job.askers, []  # who is told may withdraw at once
        for asker in sorted(askers, key=lambda one: len(one.output)):
            if asker.output and isinstance(result, CompiledGrammar):
                asker.done(followed(result, asker.output))
            else:
                asker.done(result)

    def _refuse(self, key: bytes, reason: str) -> None:
        """Of a grammar that turned out to be too slow."""
        with self._changed:
            self._cache.put(key, InvalidRequestError(reason))
