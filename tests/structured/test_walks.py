"""Whatever a walk along masks finishes with parses, and its schema calls it valid.

No engine and no model takes part: tokens are drawn of what masks let through, so that rare ones
come as often as others. The demo model's tokenizer has a token for each byte.
"""

from __future__ import annotations

import json
import random

import pytest
from jsonschema import Draft202012Validator

from nanocore.protocol.errors import InvalidRequestError
from tests.campaign import in_campaign
from tests.structured.corpus import PARTS, REFUSED, SCHEMAS
from tests.structured.validity import exact_validator, why_invalid
from tests.structured.walks import accepts, demo_tokens, walk

SOME = [*SCHEMAS][::15]
"""Of all parts."""


def test_the_corpus_is_large_and_of_different_schemas() -> None:
    assert len(SCHEMAS) >= 300
    assert len({json.dumps(schema) for schema in SCHEMAS.values()}) == len(SCHEMAS)


@pytest.mark.parametrize(
    ("names", "num_walks"),
    [
        (SOME, 2),
        *in_campaign(
            *(([name for name in SCHEMAS if name.startswith(f"{part}-")], 10) for part in PARTS)
        ),
    ],
    ids=["some", *PARTS],
)
def test_what_a_walk_finishes_with_is_valid(names: list[str], num_walks: int) -> None:
    """With and without white space; nine of ten walks finish, for else they would show little."""
    num_finished, wrong = 0, []
    for name in names:
        Draft202012Validator.check_schema(SCHEMAS[name])
        validator = exact_validator(SCHEMAS[name])
        for compact in (False, True):
            grammar = demo_tokens().compile(json=SCHEMAS[name], disable_any_whitespace=compact)
            for i in range(num_walks):
                output = walk(grammar, random.Random(f"{name} {compact} {i}"))
                if output is None:
                    continue
                num_finished += 1
                text = demo_tokens().text(output)
                reason = why_invalid(validator, text)
                if reason is None and compact:
                    reason = why_not_compact(text)
                if reason is not None:
                    wrong.append((name, text, reason))
    assert wrong == []
    assert num_finished >= 0.9 * 2 * num_walks * len(names)


def why_not_compact(text: str) -> str | None:
    """None if there is no white space outside of strings."""
    value = json.loads(text, object_pairs_hook=list)  # which keeps a name that is there twice
    compact = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    num_blanks = sum(map(text.count, " \n\t\r")) - sum(map(compact.count, " \n\t\r"))
    return f"it has {num_blanks} blanks" if num_blanks else None


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_compiled_is_refused_in_words(name: str) -> None:
    schema, words = REFUSED[name]
    with pytest.raises(InvalidRequestError, match=words):
        demo_tokens().compile(json=schema)


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({"type": "string", "format": "date"}, '"2023-02-29"'),
        ({"type": "string", "format": "time"}, '"11:59:60Z"'),
        ({"type": "object", "additionalProperties": {"type": "null"}}, '{"a":null,"a":null}'),
    ],
    ids=["no-leap-year", "no-leap-second", "a-name-twice"],
)
def test_what_grammars_do_not_see(schema: dict[str, object], text: str) -> None:
    """Known limits: when one falls, so does what is said of it in `formats` and `validity`."""
    grammar = demo_tokens().compile(json=schema)
    assert accepts(grammar, demo_tokens().tokenizer.encode(text).ids)
