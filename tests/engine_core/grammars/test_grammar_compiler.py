"""The pool that compiles: turns, sharing, what is kept or refused, and what is withdrawn."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import Queue

import numpy as np
import pytest

from nanocore.engine_core.grammars import grammar_compiler as grammars_module
from nanocore.engine_core.grammars.compilation import compile_grammar
from nanocore.engine_core.grammars.grammar_compiler import (
    MAX_IN_HAND,
    GrammarCache,
    GrammarCompiler,
    digest,
)
from nanocore.engine_core.grammars.token_matcher import Compiled, CompiledGrammar
from nanocore.engine_core.grammars.token_table import TokenTable
from nanocore.protocol.errors import EngineOverloadedError, InvalidRequestError
from nanocore.protocol.structured_outputs import StructuredOutputs
from nanocore.system import large_stack_threads
from nanocore.system.large_stack_threads import start_thread

WAIT_S = 60


def want(name: str) -> StructuredOutputs:
    return StructuredOutputs(choice=[name])


def grammar(vocabulary: TokenTable, num_bytes: int = 1) -> CompiledGrammar:
    words_W = np.zeros(vocabulary.num_words, dtype=np.int32)
    return CompiledGrammar(vocabulary, None, words_W, num_bytes)  # type: ignore[arg-type]


class Gate:
    """Tries as a test lets it: names in the order in which they were begun."""

    def __init__(self) -> None:
        self.begun: Queue[str] = Queue()
        self.ends: dict[str, threading.Event] = {}

    def run(self, wanted: StructuredOutputs) -> tuple[str, list[str]]:
        [name] = wanted.choice or []
        self.begun.put(name)
        if name in self.ends:
            assert self.ends[name].wait(WAIT_S)
        if name == "refused":
            raise InvalidRequestError("refused it is")
        if name == "busy":
            raise EngineOverloadedError("the process is gone", 5.0)
        if name == "no memory":
            raise MemoryError
        if name == "broken":
            raise RuntimeError("a mistake of ours")
        return json.dumps({"grammars": [{"lark_grammar": f'start: "{name}"'}]}), []

    def close(self) -> None:
        for event in self.ends.values():
            event.set()

    def hold(self, *names: str) -> None:
        self.ends |= {name: threading.Event() for name in names}


@contextmanager
def pool(vocabulary: TokenTable, gate: Gate, threads: int = 1) -> Iterator[GrammarCompiler]:
    grammars = GrammarCompiler(lambda: vocabulary, gate, threads)
    try:
        yield grammars
    finally:
        grammars.close()


def test_requests_are_compiled_in_the_order_in_which_they_came(
    vocabulary: TokenTable,
) -> None:
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


def test_requests_that_want_the_same_share_one_compilation(vocabulary: TokenTable) -> None:
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


def test_what_was_refused_is_remembered(vocabulary: TokenTable) -> None:
    gate = Gate()
    done: Queue[Compiled] = Queue()
    with pool(vocabulary, gate) as grammars:
        grammars.compile(want("refused"), done.put)
        result = done.get(timeout=WAIT_S)
        assert isinstance(result, InvalidRequestError)
        assert str(grammars.find(want("refused"))) == str(result) == "refused it is"
        assert gate.begun.qsize() == 1


def test_an_error_of_ours_is_told_and_the_thread_goes_on(vocabulary: TokenTable) -> None:
    gate = Gate()
    done: Queue[Compiled] = Queue()
    with pool(vocabulary, gate) as grammars:
        for name in ("broken", "a"):
            grammars.compile(want(name), done.put)
        assert "a mistake of ours" in str(done.get(timeout=WAIT_S))
        assert isinstance(done.get(timeout=WAIT_S), CompiledGrammar)


def test_a_grammar_that_turns_out_too_slow_is_refused_from_then_on(
    vocabulary: TokenTable,
) -> None:
    done: Queue[Compiled] = Queue()
    with pool(vocabulary, Gate()) as grammars:
        grammars.compile(want("a"), done.put)
        result = done.get(timeout=WAIT_S)
        assert isinstance(result, CompiledGrammar)
        result.on_too_slow("too slow it is")
        assert str(grammars.find(want("a"))) == "too slow it is"


def test_when_too_much_waits_new_ones_are_sent_away_but_not_known_ones(
    vocabulary: TokenTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nanocore.engine_core.grammars.grammar_compiler.MAX_WAITING", 2)
    gate = Gate()
    done: Queue[Compiled] = Queue()
    with pool(vocabulary, gate) as grammars:
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


def test_clients_are_served_by_turns(vocabulary: TokenTable) -> None:
    gate = Gate()
    gate.hold("held")
    with pool(vocabulary, gate) as grammars:
        grammars.compile(want("held"), lambda _: None, 1)
        assert gate.begun.get(timeout=WAIT_S) == "held"
        for name, client in [("a1", 1), ("a2", 1), ("a3", 1), ("b1", 2), ("b2", 2), ("c1", 3)]:
            grammars.compile(want(name), lambda _: None, client)
        gate.ends["held"].set()
        order = [gate.begun.get(timeout=WAIT_S) for _ in range(6)]
        assert order == ["a1", "b1", "c1", "a2", "b2", "a3"]


def test_a_clients_long_ones_leave_a_thread_for_other_clients(
    vocabulary: TokenTable,
) -> None:
    gate = Gate()
    gate.hold(*"abc")
    with pool(vocabulary, gate, threads=MAX_IN_HAND + 1) as grammars:
        done: Queue[Compiled] = Queue()
        for name in "abc":
            grammars.compile(want(name), done.put, client=1)
        assert {gate.begun.get(timeout=WAIT_S) for _ in range(MAX_IN_HAND)} == {"a", "b"}
        grammars.compile(want("other"), done.put, client=2)
        assert gate.begun.get(timeout=WAIT_S) == "other"
        assert isinstance(done.get(timeout=WAIT_S), CompiledGrammar)
        assert gate.begun.empty()
        gate.ends["b"].set()
        assert gate.begun.get(timeout=WAIT_S) == "c"


def test_what_waits_is_limited_for_each_client_alone(
    vocabulary: TokenTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nanocore.engine_core.grammars.grammar_compiler.MAX_WAITING", 1)
    gate = Gate()
    gate.hold("held")
    with pool(vocabulary, gate) as grammars:
        grammars.compile(want("held"), lambda _: None, 1)
        assert gate.begun.get(timeout=WAIT_S) == "held"
        grammars.compile(want("a"), lambda _: None, 1)
        assert isinstance(grammars.find(want("b"), 1), EngineOverloadedError)
        assert grammars.find(want("b"), 2) is None


def test_what_nobody_waits_for_any_more_is_not_begun(vocabulary: TokenTable) -> None:
    gate = Gate()
    gate.hold("held")
    done: Queue[str] = Queue()
    with pool(vocabulary, gate) as grammars:
        withdraw = {
            name: grammars.compile(want(name), lambda _, name=name: done.put(name), 1)
            for name in ("held", "alone", "shared")
        }
        assert gate.begun.get(timeout=WAIT_S) == "held"
        grammars.compile(want("shared"), lambda _: done.put("shared by 2"), 2)
        grammars.compile(want("last"), lambda _: done.put("last"), 2)
        for one in withdraw.values():
            one()
            one()  # again is as once
        gate.ends["held"].set()
        assert [done.get(timeout=WAIT_S) for _ in range(2)] == ["shared by 2", "last"]
        assert [gate.begun.get_nowait() for _ in range(2)] == ["shared", "last"]
        assert gate.begun.empty()
        assert isinstance(grammars.find(want("held")), CompiledGrammar)  # it was begun, and is kept
        assert grammars.find(want("alone")) is None


def test_who_withdraws_when_told_keeps_nobody_from_being_told(
    vocabulary: TokenTable,
) -> None:
    gate = Gate()
    gate.hold("a")
    told: Queue[int] = Queue()
    withdrawals: list[Callable[[], None]] = []

    def tell(i: int) -> None:
        withdrawals[i]()
        told.put(i)

    with pool(vocabulary, gate) as grammars:
        withdrawals += [
            grammars.compile(want("a"), lambda _, i=i: tell(i))  # type: ignore[misc]
            for i in range(4)
        ]
        gate.ends["a"].set()
        assert [told.get(timeout=WAIT_S) for _ in range(4)] == [0, 1, 2, 3]


@pytest.mark.parametrize("name", ["busy", "no memory"])
def test_what_may_be_over_soon_is_told_and_not_remembered(
    vocabulary: TokenTable, name: str
) -> None:
    done: Queue[Compiled] = Queue()
    with pool(vocabulary, Gate()) as grammars:
        grammars.compile(want(name), done.put)
        assert isinstance(done.get(timeout=WAIT_S), EngineOverloadedError)
        assert grammars.find(want(name)) is None


def test_a_long_trials_thread_gives_way_and_is_replaced_if_there_is_another(
    vocabulary: TokenTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[str] = []
    gave_way: list[threading.Thread] = []

    def start(target: Callable[[], None], name: str) -> threading.Thread:
        started.append(name)
        if len(started) > 1:
            raise RuntimeError("can't start new thread")
        return start_thread(target, name)

    monkeypatch.setattr(grammars_module, "_QUICK_S", -1.0)
    monkeypatch.setattr(grammars_module, "give_way", gave_way.append)
    done: Queue[Compiled] = Queue()
    with pool(vocabulary, Gate()) as grammars:
        monkeypatch.setattr(grammars_module, "start_thread", start)
        for name in "abc":
            grammars.compile(want(name), done.put)
            assert isinstance(done.get(timeout=WAIT_S), CompiledGrammar)
    first, second, third = gave_way
    assert first is not second
    assert second is third
    assert started[:2] == ["grammars-0", "grammars-0"]


def test_a_refusal_holds_nothing_of_where_it_came_from(vocabulary: TokenTable) -> None:
    """Of exceptions the traceback would keep matchers alive, for as long as it is remembered."""
    done: Queue[Compiled] = Queue()
    with pool(vocabulary, Gate()) as grammars:
        grammars.compile(want("refused"), done.put)
        told = done.get(timeout=WAIT_S)
        found = [grammars.find(want("refused")) for _ in range(2)]
        assert found[0] is not found[1]
        for error in (told, *found):
            assert isinstance(error, InvalidRequestError)
            assert (error.__traceback__, error.__context__, error.__cause__) == (None, None, None)


def test_a_process_that_ends_hears_whether_a_thread_is_still_busy(
    vocabulary: TokenTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(large_stack_threads, "_started", [])  # without other tests'
    gate = Gate()
    gate.hold("held")
    monkeypatch.setattr(gate, "close", lambda: None)
    grammars = GrammarCompiler(lambda: vocabulary, gate, 1)
    grammars.compile(want("held"), lambda _: None)
    assert gate.begun.get(timeout=WAIT_S) == "held"
    grammars.close()
    assert not large_stack_threads.join_threads(0.01)
    gate.ends["held"].set()
    assert large_stack_threads.join_threads(WAIT_S)


def test_a_closed_pool_compiles_nothing_more(vocabulary: TokenTable) -> None:
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


def test_what_is_long_to_compile_is_large_to_keep(vocabulary: TokenTable) -> None:
    """The second takes 20 MB in llguidance, and its text is hardly longer."""
    small, large = (
        compile_grammar(vocabulary, StructuredOutputs(json=f'{{"multipleOf":{divisor}}}'))[1]
        for divisor in (13, 60013)
    )
    assert large.num_bytes > 10 * small.num_bytes


def test_the_longest_unused_are_forgotten_first(vocabulary: TokenTable) -> None:
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
    assert len(cache._known) == 1
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
