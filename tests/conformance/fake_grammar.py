"""Structured outputs of the fake engine: every kind comes down to a list of texts.

It knows as much of schemas, expressions and grammars as the conformance rules and vectors ask for.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

from nanocore.protocol.structured_outputs import StructuredOutputs

EOS_ID, VOCAB_SIZE = 5, 50
_CHARACTERS = 'abcdefghijklmnopqrstuvwxyz0123456789{}":, <>/[]'
PIECES = [*_CHARACTERS[:EOS_ID], "", *_CHARACTERS[EOS_ID:], "ye", "ab"]
"""The text of each token; EOS has none."""
TOKENIZER = json.dumps(
    {
        "version": "1.0",
        "added_tokens": [],
        "model": {
            "type": "WordLevel",
            "vocab": {piece or "<eos>": token for token, piece in enumerate(PIECES)},
            "unk_token": "a",
        },
        "decoder": {"type": "Fuse"},
    }
).encode()
"""As tokenizer.json; it decodes, and that is all that is asked of it."""
_TYPES = ("object", "array", "string", "integer", "number", "boolean", "null")
_MAX_EXPANSIONS = 200
_MANY = 2000
"""Characters of what is free: more than any rule asks for."""


class UncompilableError(Exception):
    """What is wanted makes no sense; says where."""


def texts_of(wanted: StructuredOutputs) -> list[str]:
    """The texts that the output may be: all of them, or some where there are many.

    Raises:
        UncompilableError: it has none.
    """
    return _form(wanted) + [
        prefix + rest for prefix in wanted.free_prefixes for rest in ("", "a" * _MANY)
    ]


def _form(wanted: StructuredOutputs) -> list[str]:
    if wanted.json is not None:
        try:
            schema = json.loads(wanted.json)
        except ValueError as error:
            raise UncompilableError(f"json: {error}") from None
        return [json.dumps(value, separators=(",", ":")) for value in _instances(schema, "")]
    if wanted.regex is not None:
        return _matches(wanted.regex)
    if wanted.grammar is not None:
        return _sentences(wanted.grammar)
    if wanted.structural_tag is not None:
        one = wanted.structural_tag.structures[0]
        return ["hi", one.begin + "1" + one.end]
    return ["{}"] if wanted.choice is None else wanted.choice


def may_follow(texts: Sequence[str], output: Sequence[int], defects: set[str]) -> set[int]:
    """The tokens with which the output can go on."""
    text = "".join(PIECES[token] for token in output)
    ends = text in texts or "structured-eos-anywhere" in defects
    tokens = {EOS_ID} if ends else set()
    if EOS_ID in output:
        return {0} if "structured-eos-once" in defects else tokens
    return tokens | {
        token
        for token, piece in enumerate(PIECES)
        if piece and any(one.startswith(text + piece) for one in texts)
    }


def _instances(schema: Any, place: str) -> list[Any]:
    """Some values of a schema; place: the JSON pointer to it."""
    if not isinstance(schema, dict):
        return [1]
    if schema.get("type", "integer") not in _TYPES:
        raise UncompilableError(f"json: {place}: no type {schema['type']!r}")
    properties = {
        name: _instances(inner, f"{place}/properties/{name}")
        for name, inner in schema.get("properties", {}).items()
    }
    if properties:
        values = itertools.product(*properties.values())
        return [dict(zip(properties, row, strict=True)) for row in values]
    return list(schema.get("enum", [1]))


def _matches(regex: str) -> list[str]:
    try:
        pattern = re.compile(regex)
    except re.error as error:
        raise UncompilableError(f"regex: {error}") from None
    alphabet = sorted(set(filter(str.isalpha, regex)))
    lengths = (1, 2, 3, 100)
    some = itertools.chain.from_iterable(
        itertools.islice(itertools.product(alphabet, repeat=length), 30) for length in lengths
    )
    return [text for row in some if pattern.fullmatch(text := "".join(row))]


def _sentences(grammar: str) -> list[str]:
    """Of Lark rules with texts and names, in alternatives."""
    rules: dict[str, list[list[str]]] = {}
    for number, line in enumerate(grammar.replace("\n  |", " |").splitlines(), 1):
        name, _, body = line.partition(":")
        if "(" in body:
            raise UncompilableError(f"grammar: {number + 1}:5: a bracket is open")
        rules[name.strip()] = [part.split() for part in body.split("|")]
    return [*itertools.islice(_expand(["start"], rules), _MAX_EXPANSIONS)]


def _expand(symbols: list[str], rules: dict[str, list[list[str]]]) -> Iterator[str]:
    """Breadth first, so that a rule which calls itself does no harm."""
    waiting = [("", symbols)]
    while waiting:
        text, rest = waiting.pop(0)
        if not rest:
            yield text
        elif rest[0] in rules:
            waiting += [(text, [*part, *rest[1:]]) for part in rules[rest[0]]]
        else:
            waiting.append((text + rest[0].strip('"'), rest[1:]))
