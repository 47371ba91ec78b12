"""Compiles grammars for requests, and caches them.

Clients take turns, each in the order of its requests; equal structured outputs share one
compilation. llguidance cannot be interrupted: so everything is first compiled in a process that may
be killed (`compile_process`), and the engine compiles only what was cheap there.

llguidance takes seconds to load 262,144 tokens, in the engine and once more in that process, and
holds the interpreter's lock meanwhile. No other request needs it. So the vocabulary is loaded in a
moment in which the engine has nothing to do, or when a request asks for a structured output.
"""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Final, TypeAlias

import msgspec

from nanocore.engine_core.grammars.compilation import compile_text, followed
from nanocore.engine_core.grammars.compile_process import NUM_WORKERS, CompileProcess, engine_error
from nanocore.engine_core.grammars.token_matcher import Compiled, CompiledGrammar
from nanocore.engine_core.grammars.token_table import TokenTable, VocabularySource
from nanocore.protocol.errors import EngineOverloadedError, InvalidRequestError
from nanocore.protocol.structured_outputs import StructuredOutputs
from nanocore.system.large_stack_threads import give_way, start_thread

logger = logging.getLogger(__name__)

_REFUSAL_BYTES = 2048
"""An entry with its digest and a text of a few lines."""


def digest(wanted: StructuredOutputs) -> bytes:
    """Collision-resistant digest of all fields."""
    return hashlib.blake2b(msgspec.msgpack.encode(wanted), digest_size=32).digest()


class GrammarCache:
    """LRU cache of grammars and refusals by digest, bounded in bytes. One thread at a time uses it.

    For a refusal only the text is kept: an exception would keep the frames that it passed.
    """

    def __init__(self, max_bytes: int) -> None:
        self.num_bytes = 0
        self._max_bytes = max_bytes
        self._known: OrderedDict[bytes, CompiledGrammar | str] = OrderedDict()

    def find(self, key: bytes) -> CompiledGrammar | InvalidRequestError | None:
        found = self._known.get(key)
        if found is not None:
            self._known.move_to_end(key)
        return InvalidRequestError(found) if isinstance(found, str) else found

    def put(self, key: bytes, value: CompiledGrammar | InvalidRequestError) -> None:
        self.num_bytes -= _num_bytes(self._known.pop(key, None))
        kept = str(value) if isinstance(value, InvalidRequestError) else value
        self._known[key] = kept
        self.num_bytes += _num_bytes(kept)
        while self.num_bytes > self._max_bytes and len(self._known) > 1:
            self.num_bytes -= _num_bytes(self._known.popitem(last=False)[1])


def _num_bytes(value: CompiledGrammar | str | None) -> int:
    if isinstance(value, CompiledGrammar):
        return value.num_bytes
    return 0 if value is None else _REFUSAL_BYTES


@dataclass(eq=False)
class _Waiter:
    client: int
    done: Callable[[Compiled], None]
    output: Sequence[int]


@dataclass(eq=False)
class _Job:
    """A compilation and the requests that wait for it.

    was_slow: it has lowered the priority of its thread, for good.
    """

    key: bytes
    wanted: StructuredOutputs
    askers: list[_Waiter] = field(default_factory=list)
    is_begun: bool = False
    was_slow: bool = False


class _FairQueue:
    """A queue in which clients take turns, each with its jobs in order. For a thread at a time.

    A client with many jobs delays itself, and others by one job each. At most MAX_IN_HAND jobs of a
    client are processed at a time, so that others find a free thread. A job may be queued for
    several clients, once for each.
    """

    def __init__(self) -> None:
        self._in_hand: Counter[int] = Counter()
        self._waiting: OrderedDict[int, dict[_Job, None]] = OrderedDict()

    def __bool__(self) -> bool:
        return next(self._turns(), None) is not None

    def count(self, client: int) -> int:
        return len(self._waiting.get(client, ()))

    def add(self, client: int, job: _Job) -> None:
        self._waiting.setdefault(client, {})[job] = None

    def remove(self, client: int, job: _Job) -> None:
        own = self._waiting.get(client, {})
        own.pop(job, None)
        if not own:
            self._waiting.pop(client, None)

    def pop(self) -> tuple[int, _Job]:
        """Take the next client's oldest job, also from others' queues.

        It counts as in hand until `done`.

        Raises:
            StopIteration: there is none.
        """
        client = next(self._turns())
        job = next(iter(self._waiting[client]))
        self._waiting.move_to_end(client)
        for asker in job.askers:
            self.remove(asker.client, job)
        self._in_hand[client] += 1
        return client, job

    def done(self, client: int) -> None:
        self._in_hand -= Counter((client,))  # without zeros

    def _turns(self) -> Iterator[int]:
        """Clients that may be served, the next one first."""
        return (c for c in self._waiting if self._in_hand[c] < MAX_IN_HAND)


MAX_WAITING: Final = 256
"""Compilations that wait for one client; beyond that, its requests that need one are sent away."""
MAX_IN_HAND: Final = 2
"""Compilations of one client at a time: long ones of its own delay no other client."""
MAX_CACHE_BYTES: Final = 256 * 2**20
_QUICK_S: Final = 0.05
"""Grammars that took longer in the compile process are compiled at low priority."""
_RETRY_AFTER_S: Final = 5.0


class GrammarCompiler:
    """Compiles and caches structured outputs outside the step loop. Any thread may call it.

    load: returns the vocabulary, or raises an InvalidRequestError for all who ask; called once.
    process: closed with it.
    """

    def __init__(
        self,
        load: Callable[[], TokenTable],
        process: CompileProcess,
        num_threads: int = NUM_WORKERS,
    ) -> None:
        self._load = load
        self._loading = threading.Lock()
        self._loaded: Future[TokenTable] = Future()
        self._process = process
        self._cache = GrammarCache(MAX_CACHE_BYTES)
        self._jobs: dict[bytes, _Job] = {}
        self._waiting = _FairQueue()
        self._is_closed = False
        self._changed = threading.Condition()
        for place in range(num_threads):
            self._start(place)

    def prepare(self) -> None:
        """Load the vocabulary for a request to come."""
        try:
            self._vocabulary()
        except InvalidRequestError as error:
            logger.info("%s", error)

    def find(self, wanted: StructuredOutputs, client: int = 0) -> Compiled | None:
        """Return the known result, or an error if the client waits for too many others.

        Never waits. client: who wants it.
        """
        key = digest(wanted)
        with self._changed:
            known = self._cache.find(key)
            num_waiting = self._waiting.count(client)
            if known is None and num_waiting >= MAX_WAITING and key not in self._jobs:
                return EngineOverloadedError(
                    f"{num_waiting} structured outputs of this session wait to be compiled, and at "
                    f"most {MAX_WAITING} may: try again later"
                )
            return known

    def compile(
        self,
        wanted: StructuredOutputs,
        done: Callable[[Compiled], None],
        client: int = 0,
        output: Sequence[int] = (),
    ) -> Callable[[], None]:
        """Start a compilation, or join a pending one for the same structured output.

        done is called once, from another thread. output: of its one sample, tokens that an earlier
        run has produced, which the grammar's one matcher is to have taken in. Returns what
        withdraws it: done need not be called then.
        """
        key, asker = digest(wanted), _Waiter(client, done, output)
        with self._changed:
            job = self._jobs.setdefault(key, _Job(key, wanted))
            job.askers.append(asker)
            if not job.is_begun:
                self._waiting.add(client, job)
            self._changed.notify_all()
        return partial(self._withdraw, job, asker)

    def close(self) -> None:
        """Drop pending compilations and end the process. Idempotent."""
        with self._changed:
            self._is_closed = True
            self._jobs.clear()
            self._changed.notify_all()
        self._process.close()

    def _withdraw(self, job: _Job, asker: _Waiter) -> None:
        """Leave a pending job. A compilation that has begun goes on and is cached for others."""
        with self._changed:
            if asker not in job.askers:
                return
            job.askers.remove(asker)
            if all(other.client != asker.client for other in job.askers):
                self._waiting.remove(asker.client, job)
            if not job.askers and not job.is_begun:
                self._jobs.pop(job.key, None)

    def _work(self, place: int) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._is_closed)
                if self._is_closed:
                    return
                client, job = self._waiting.pop()
                job.is_begun = True
                result: Compiled | None = self._cache.find(job.key)
            self._finish(client, job, result or self._compiled(job))
            if job.was_slow:
                with suppress(RuntimeError):  # the system has no other thread
                    self._start(place)
                    return

    def _start(self, place: int) -> None:
        start_thread(partial(self._work, place), f"grammars-{place}")

    def _compiled(self, job: _Job) -> Compiled:
        try:
            vocabulary = self._vocabulary()
            start_s = time.monotonic()
            text, not_held = self._process.run(job.wanted)
            if time.monotonic() - start_s > _QUICK_S:
                give_way(threading.current_thread())
                job.was_slow = True
            grammar = compile_text(vocabulary, text)
        except InvalidRequestError as error:
            return InvalidRequestError(str(error))  # a new one: without what it passed on its way
        except EngineOverloadedError as error:
            return EngineOverloadedError(str(error), error.retry_after_s)
        except (MemoryError, OSError) as error:  # may be over soon, so it is not kept
            what = f"structured_outputs.{job.wanted.kind} could not be compiled"
            return EngineOverloadedError(f"{what} ({error!r}): try again later", _RETRY_AFTER_S)
        except Exception as error:
            return InvalidRequestError(engine_error(job.wanted, error))
        grammar.not_held = not_held
        grammar.on_too_slow = partial(self._refuse, job.key)
        return grammar

    def _vocabulary(self) -> TokenTable:
        """Return the vocabulary; load it, if no other thread has.

        Raises:
            InvalidRequestError: there is none. Exception: a bug that its loading met.
        """
        with self._loading:
            if not self._loaded.done():
                start_s = time.monotonic()
                try:
                    self._loaded.set_result(self._load())
                    took_s = time.monotonic() - start_s
                    logger.info("structured outputs: vocabulary in %.2f s", took_s)
                except Exception as error:
                    self._loaded.set_exception(error)
        return self._loaded.result()

    def _finish(self, client: int, job: _Job, result: Compiled) -> None:
        """Report a result to all waiters. client: the one whose turn it was."""
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
        """Replace a cached grammar whose masks turned out to be too slow."""
        with self._changed:
            self._cache.put(key, InvalidRequestError(reason))


class NoGrammars:
    """Refuses every structured output, with this reason."""

    def __init__(self, reason: str) -> None:
        self._reason = reason

    def find(self, wanted: StructuredOutputs, client: int = 0) -> InvalidRequestError:
        return InvalidRequestError(self._reason)

    def compile(
        self,
        wanted: StructuredOutputs,
        done: Callable[[Compiled], None],
        client: int = 0,
        output: Sequence[int] = (),
    ) -> Callable[[], None]:
        done(self.find(wanted))
        return lambda: None

    def close(self) -> None:
        pass


GrammarSource: TypeAlias = GrammarCompiler | NoGrammars


def grammars_of(source: VocabularySource) -> GrammarSource:
    """Return the compiler of structured outputs; without a vocabulary, what refuses them.

    The vocabulary is loaded when it is needed.
    """
    try:
        source.check()
    except InvalidRequestError as why:
        logger.info("%s", why)
        return NoGrammars(str(why))
    process = CompileProcess(source)

    def load() -> TokenTable:
        process.start()  # it loads it, too, meanwhile
        return TokenTable.load(source)

    return GrammarCompiler(load, process)
