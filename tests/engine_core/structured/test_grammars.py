"""The pool that compiles: order, sharing, what is kept or refused, and what takes too long."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from queue import Queue
from typing import Any

import numpy as np
import pytest

from nanocore.engine_core.structured.compilation import CompiledGrammar
from nanocore.engine_core.structured.grammar_cache import GrammarCache, digest
from nanocore.engine_core.structured.grammars import MAX_REPLACEMENTS, Grammars
from nanocore.engine_core.structured.matcher import Compiled
from nanocore.engine_core.structured.vocabulary import Vocabulary
from nanocore.protocol.errors import EngineOverloadedError, InvalidRequestError
from nanocore.protocol.structured_outputs import StructuredOutputs
from tests.engine_core.structured.walks import allowed, demo_vocabulary

WAIT_S = 60


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    return demo_vocabulary()


def want(name: str) -> StructuredOutputs:
    return StructuredOutputs(choice=[name])


def grammar(vocabulary: Vocabulary, num_bytes: int = 1) -> CompiledGrammar:
    words_W = np.zeros(vocabulary.num_words, dtype=np.int32)
    return CompiledGrammar(vocabulary, None, words_W, num_bytes)  # type: ignore[arg-type]


class Gate:
    """Compiles as a test lets it: names in the order in which they were begun."""

    def __init__(self) -> None:
        self.begun: Queue[str] = Queue()
        self.ends: dict[str, threading.Event] = {}

    def __call__(self, vocabulary: Vocabulary, wanted: StructuredOutputs) -> CompiledGrammar:
        [name] = wanted.choice or []
        self.begun.put(name)
        if name in self.ends:
            assert self.ends[name].wait(WAIT_S)
        if name == "refused":
            raise InvalidRequestError("refused it is")
        if name == "broken":
            raise RuntimeError("a mistake of ours")
        return grammar(vocabulary)

    def hold(self, *names: str) -> None:
        self.ends |= {name: threading.Event() for name in names}


@contextmanager
def pool(vocabulary: Vocabulary, gate: Gate, threads: int = 1, **kwargs: Any) -> Iterator[Grammars]:
    grammars = Grammars(vocabulary, threads, compile_one=gate, **kwargs)
    try:
        yield grammars
    finally:
        grammars.close()
        for event in gate.ends.values():
            event.set()


def test_it_compiles_for_real(vocabulary: Vocabulary) -> None:
    grammars = Grammars(vocabulary)
    results: Queue[Compiled] = Queue()
    grammars.compile(want("a"), results.put)
    result = results.get(timeout=WAIT_S)
    assert isinstance(result, CompiledGrammar)
    assert vocabulary.tokenizer.decode_str(allowed(vocabulary, result.matcher())) == "a"
    assert grammars.find(want("a")) is result
    grammars.compile(StructuredOutputs(json="{"), results.put)
    assert "is not JSON" in str(results.get(timeout=WAIT_S))
    grammars.close()


def test_requests_are_compiled_in_the_order_in_which_they_came(vocabulary: Vocabulary) -> None:
    gate = Gate()
    gate.hold("0")
    done: Queue[Compiled] = Queue()
    with pool(vocabulary, gate) as grammars:
        for i in range(5):
            grammars.compile(want(str(i)), done.put)
        gate.ends["0"].set()
        assert [gate.begun.get(timeout=WAIT_S) for _ in range(5)] == list("01234")
        for _ in range(5):
            done.get(timeout=WAIT_S)


def test_requests_that_want_the_same_share_one_compilation(vocabulary: Vocabulary) -> None:
    gate = Gate()
    gate.hold("a")
    done: Queue[tuple[int, Compiled]] = Queue()
    with pool(vocabulary, gate, 2) as grammars:
        for i in range(3):
            assert grammars.find(want("a")) is None
            grammars.compile(want("a"), lambda result, i=i: done.put((i, result)))
        gate.ends["a"].set()
        answers = [done.get(timeout=WAIT_S) for _ in range(3)]
        assert [i for i, _ in answers] == [0, 1, 2]
        assert len({id(result) for _, result in answers}) == 1
        assert grammars.find(want("a")) is answers[0][1]
        grammars.compile(want("a"), lambda result: done.put((9, result)))
        assert done.get(timeout=WAIT_S) == (9, answers[0][1])
    assert gate.begun.qsize() == 1


def test_what_was_refused_is_remembered(vocabulary: Vocabulary) -> None:
    gate = Gate()
    done: Queue[Compiled] = Queue()
    with pool(vocabulary, gate) as grammars:
        grammars.compile(want("refused"), done.put)
        result = done.get(timeout=WAIT_S)
        assert isinstance(result, InvalidRequestError)
        assert grammars.find(want("refused")) is result


def test_an_error_of_ours_is_told_and_the_thread_goes_on(vocabulary: Vocabulary) -> None:
    gate = Gate()
    done: Queue[Compiled] = Queue()
    with pool(vocabulary, gate) as grammars:
        for name in ("broken", "a"):
            grammars.compile(want(name), done.put)
        assert "a mistake of ours" in str(done.get(timeout=WAIT_S))
        assert isinstance(done.get(timeout=WAIT_S), CompiledGrammar)


def test_a_grammar_that_turns_out_too_slow_is_refused_from_then_on(
    vocabulary: Vocabulary,
) -> None:
    done: Queue[Compiled] = Queue()
    with pool(vocabulary, Gate()) as grammars:
        grammars.compile(want("a"), done.put)
        result = done.get(timeout=WAIT_S)
        assert isinstance(result, CompiledGrammar)
        result.on_too_slow("too slow it is")
        assert str(grammars.find(want("a"))) == "too slow it is"


def test_when_too_much_waits_new_ones_are_sent_away_but_not_known_ones(
    vocabulary: Vocabulary,
) -> None:
    gate = Gate()
    done: Queue[Compiled] = Queue()
    with pool(vocabulary, gate, max_waiting=2) as grammars:
        grammars.compile(want("known"), done.put)
        done.get(timeout=WAIT_S)
        gate.hold("held")
        grammars.compile(want("held"), done.put)
        assert [gate.begun.get(timeout=WAIT_S) for _ in range(2)] == ["known", "held"]
        for name in "ab":
            assert grammars.find(want(name)) is None
            grammars.compile(want(name), done.put)
        overloaded = grammars.find(want("c"))
        assert isinstance(overloaded, EngineOverloadedError)
        assert overloaded.retry_after_s > 0
        assert isinstance(grammars.find(want("known")), CompiledGrammar)
        assert grammars.find(want("a")) is None  # it may join


def test_a_compilation_that_hangs_is_answered_for_and_others_go_on(
    vocabulary: Vocabulary,
) -> None:
    gate = Gate()
    gate.hold("hangs")
    done: Queue[tuple[str, Compiled]] = Queue()
    with pool(vocabulary, gate, compile_limit_s=0.01) as grammars:
        for name in ("hangs", "a"):
            grammars.compile(want(name), lambda result, name=name: done.put((name, result)))
        name, result = done.get(timeout=WAIT_S)
        assert name == "hangs"
        assert "compiling it takes more than 0.01 s" in str(result)
        assert done.get(timeout=WAIT_S)[0] == "a"
        assert grammars.find(want("hangs")) is result
        gate.ends["hangs"].set()
        grammars.compile(want("b"), lambda result: done.put(("b", result)))
        assert done.get(timeout=WAIT_S)[0] == "b"
        assert done.empty()  # nobody is told twice


def test_threads_are_replaced_a_few_times_and_come_back(vocabulary: Vocabulary) -> None:
    """What waits when all hang is compiled when one of them is done."""
    gate = Gate()
    names = [f"hangs{i}" for i in range(MAX_REPLACEMENTS + 1)]
    gate.hold(*names)
    done: Queue[Compiled] = Queue()
    with pool(vocabulary, gate, compile_limit_s=0.01) as grammars:
        for name in names:
            grammars.compile(want(name), done.put)
        for _ in names:
            assert "takes more than" in str(done.get(timeout=WAIT_S))
        grammars.compile(want("last"), done.put)
        assert [gate.begun.get(timeout=WAIT_S) for _ in names] == names
        for name in names:
            gate.ends[name].set()
        done.get(timeout=WAIT_S)
        assert gate.begun.get(timeout=WAIT_S) == "last"


def test_a_closed_pool_compiles_nothing_more(vocabulary: Vocabulary) -> None:
    gate = Gate()
    gate.hold("a")
    done: Queue[Compiled] = Queue()
    with pool(vocabulary, gate) as grammars:
        grammars.compile(want("a"), done.put)
        grammars.compile(want("b"), done.put)
        assert gate.begun.get(timeout=WAIT_S) == "a"
        grammars.close()
        gate.ends["a"].set()
        grammars.compile(want("c"), done.put)
    assert done.empty()
    assert gate.begun.empty()


def test_the_longest_unused_are_forgotten_first(vocabulary: Vocabulary) -> None:
    cache = GrammarCache(max_bytes=30_000)
    keys = [digest(want(name)) for name in "abc"]
    for key in keys[:2]:
        cache.put(key, grammar(vocabulary, 12_000))
    assert cache.find(keys[0]) is not None
    cache.put(keys[2], grammar(vocabulary, 12_000))
    assert [cache.find(key) is not None for key in keys] == [True, False, True]
    assert cache.num_bytes == 24_000
    cache.put(keys[0], InvalidRequestError("too slow"))
    assert cache.num_bytes < 24_000
    cache.put(keys[1], grammar(vocabulary, 10**9))
    assert len(cache) == 1
    assert cache.find(keys[1]) is not None


def test_all_that_is_wanted_is_in_the_digest() -> None:
    wants = [
        StructuredOutputs(json="{}"),
        StructuredOutputs(json="{}", disable_any_whitespace=True),
        StructuredOutputs(json="{ }"),
        StructuredOutputs(regex="{}"),
        StructuredOutputs(choice=["{}"]),
        StructuredOutputs(choice=["{", "}"]),
        StructuredOutputs(json_object=True),
    ]
    assert len({digest(one) for one in wants}) == len(wants)
    assert digest(StructuredOutputs(json="{}")) == digest(wants[0])
