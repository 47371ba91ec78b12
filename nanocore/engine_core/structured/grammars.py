"""Grammars of requests: compiled by threads beside the step loop, and kept for those to come.

Requests are served in the order in which they came; those that want the same at once share one
compilation. Threads are less urgent than the step loop's. llguidance cannot be interrupted: what
bounds a compilation are its limits.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Final

from nanocore.engine_core.structured.compilation import CompiledGrammar, compile_grammar
from nanocore.engine_core.structured.grammar_cache import GrammarCache, digest
from nanocore.engine_core.structured.matcher import Compiled
from nanocore.engine_core.structured.threads import start_thread
from nanocore.engine_core.structured.vocabulary import Vocabulary
from nanocore.protocol.errors import EngineOverloadedError, InvalidRequestError
from nanocore.protocol.structured_outputs import StructuredOutputs

MAX_WAITING: Final = 256
"""Compilations that wait; beyond that, requests that need one are sent away."""
MAX_CACHE_BYTES: Final = 256 * 2**20
NICENESS: Final = 10
Compile = Callable[[Vocabulary, StructuredOutputs], CompiledGrammar]


class Grammars:
    """A `GrammarSource` with threads of its own. Any thread may call it."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        num_threads: int = 2,
        max_waiting: int = MAX_WAITING,
        max_cache_bytes: int = MAX_CACHE_BYTES,
        compile_one: Compile = compile_grammar,
    ) -> None:
        self._vocabulary = vocabulary
        self._max_waiting = max_waiting
        self._compile_one = compile_one
        self._cache = GrammarCache(max_cache_bytes)
        self._waiting: deque[tuple[bytes, StructuredOutputs]] = deque()
        self._askers: dict[bytes, list[Callable[[Compiled], None]]] = {}
        self._is_closed = False
        self._changed = threading.Condition()
        self._threads = [
            start_thread(self._work, f"grammars-{i}", NICENESS) for i in range(num_threads)
        ]

    def find(self, wanted: StructuredOutputs) -> Compiled | None:
        """What this came to before; an EngineOverloadedError if too much waits to be compiled."""
        key = digest(wanted)
        with self._changed:
            known = self._cache.find(key)
            if known is None and key not in self._askers:
                if len(self._waiting) >= self._max_waiting:
                    return EngineOverloadedError(
                        f"{len(self._waiting)} structured outputs wait to be compiled, and at most "
                        f"{self._max_waiting} may: try again later"
                    )
            return known

    def compile(self, wanted: StructuredOutputs, done: Callable[[Compiled], None]) -> None:
        """Begin to compile it, or join those that wait for the same; see `GrammarSource`."""
        key = digest(wanted)
        with self._changed:
            askers = self._askers.setdefault(key, [])
            askers.append(done)
            if len(askers) == 1:
                self._waiting.append((key, wanted))
                self._changed.notify()

    def close(self) -> None:
        """Forget what waits; threads end with what they are compiling."""
        with self._changed:
            self._is_closed = True
            self._waiting.clear()
            self._askers.clear()
            self._changed.notify_all()

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._is_closed)
                if self._is_closed:
                    return
                key, wanted = self._waiting.popleft()
                known = self._cache.find(key)
            result = self._compiled(key, wanted) if known is None else known
            with self._changed:
                self._cache.put(key, result)
                askers = self._askers.pop(key, [])
            for done in askers:
                done(result)

    def _compiled(
        self, key: bytes, wanted: StructuredOutputs
    ) -> CompiledGrammar | InvalidRequestError:
        try:
            grammar = self._compile_one(self._vocabulary, wanted)
        except InvalidRequestError as error:
            return error
        grammar.on_too_slow = lambda reason: self._refuse(key, reason)
        return grammar

    def _refuse(self, key: bytes, reason: str) -> None:
        """Of a grammar that turned out to be too slow."""
        with self._changed:
            self._cache.put(key, InvalidRequestError(reason))
