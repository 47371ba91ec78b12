"""A structured output that is resumed: its matcher is where that of the earlier run was."""

from __future__ import annotations

import json
import random
from queue import Queue
from typing import Any

import pytest

from nanocore.engine_core.grammars import compilation
from nanocore.engine_core.grammars.compilation import followed
from nanocore.engine_core.grammars.token_matcher import Compiled, CompiledGrammar
from nanocore.engine_core.grammars.token_table import TokenTable
from nanocore.protocol.errors import InvalidRequestError
from nanocore.protocol.structured_outputs import StructuredOutputs
from tests.campaign import examples
from tests.engine_core.grammars.test_grammar_compiler import WAIT_S, Gate, pool
from tests.engine_core.grammars.walks import allowed, compiled

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[A-Z][a-z]{1,12}$"},
        "tags": {"type": "array", "items": {"enum": ["red", "green", 7]}, "maxItems": 3},
    },
    "required": ["name", "tags"],
}
KINDS: dict[str, dict[str, Any]] = {
    "json": {"json": json.dumps(SCHEMA)},
    "any json": {"json_object": True},
    "regex": {"regex": r"([a-z0-9]+ )*<\|im_[a-z]+\|>|ß*"},
    "choice": {"choice": ["yes", "no", "perhaps", "perhaps not"]},
    "grammar": {"grammar": 'start: "(" item ("," item)* ")"\nitem: /[0-9]{1,3}/ | start'},
}


def matcher_of(result: Compiled) -> Any:
    assert isinstance(result, CompiledGrammar)
    return result.matcher()


@pytest.mark.parametrize("kind", KINDS)
def test_from_anywhere_in_a_walk_along_masks_it_goes_on_as_the_walk_does(
    vocabulary: TokenTable, kind: str
) -> None:
    grammar = compiled(vocabulary, **KINDS[kind])
    for seed in range(examples(10)):
        generator, walker, output = random.Random(seed), grammar.matcher(), list[int]()
        for _ in range(30):
            mask = allowed(vocabulary, walker)
            assert allowed(vocabulary, matcher_of(followed(grammar, output))) == mask
            output.append(generator.choice(mask))
            walker.append(output[-1:])


def test_what_it_forbids_is_refused_with_its_place(vocabulary: TokenTable) -> None:
    grammar = compiled(vocabulary, regex="[ab]{2}c")
    a, z = (vocabulary.first_token(letter) for letter in "az")
    refusal = followed(grammar, [a, z, a])
    assert isinstance(refusal, InvalidRequestError)
    assert f"output_token_ids[1]={z} is not what structured_outputs allows" in str(refusal)


def test_what_takes_too_long_to_follow_is_refused(
    vocabulary: TokenTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compilation, "FOLLOW_S", -1.0)
    a = vocabulary.first_token("a")
    refusal = followed(compiled(vocabulary, regex="a*"), [a, a])
    assert isinstance(refusal, InvalidRequestError)
    assert "output_token_ids[0]" in str(refusal)


def test_those_that_share_a_compilation_have_their_own_outputs(
    vocabulary: TokenTable,
) -> None:
    gate = Gate()
    gate.hold("abc")
    wanted = StructuredOutputs(choice=["abc"])
    a, b, c, z = (vocabulary.first_token(letter) for letter in "abcz")
    done: dict[str, Queue[Compiled]] = {name: Queue() for name in ("", "a", "ab", "z")}
    with pool(vocabulary, gate) as grammars:
        grammars.compile(wanted, done["ab"].put, 1, [a, b])
        grammars.compile(wanted, done["z"].put, 2, [z])
        grammars.compile(wanted, done["a"].put, 1, [a])
        grammars.compile(wanted, done[""].put, 1)
        gate.ends["abc"].set()
        results = {name: queue.get(timeout=WAIT_S) for name, queue in done.items()}
        assert isinstance(results[""], CompiledGrammar)
        assert isinstance(results["z"], InvalidRequestError)
        ab, a_alone = matcher_of(results["ab"]), matcher_of(results["a"])
        assert c in allowed(vocabulary, ab)
        assert b in allowed(vocabulary, a_alone)
        assert b not in allowed(vocabulary, ab)
        assert grammars.find(wanted) is results[""], "one output's mistakes are not the grammar's"
        grammars.compile(wanted, done["a"].put, 1, [a])
        assert b in allowed(vocabulary, matcher_of(done["a"].get(timeout=WAIT_S)))
    assert gate.begun.qsize() == 1


def test_a_refusal_is_told_whatever_the_outputs_are(vocabulary: TokenTable) -> None:
    done: Queue[Compiled] = Queue()
    with pool(vocabulary, Gate()) as grammars:
        grammars.compile(StructuredOutputs(choice=["refused"]), done.put, 1, [5])
        assert str(done.get(timeout=WAIT_S)) == "refused it is"
