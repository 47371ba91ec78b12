"""The JSON-Schema-Test-Suite's cases, which travel in jsonschema's source package.

A value that the suite calls valid should be one that masks let through, in some spelling; one that
it calls invalid must not be, in any. A spelling is compact JSON text, with its properties in some
order: a grammar has them in its schema's.

`python -m tests.structured.schema_suite FOLDER` writes the figures that may not get worse.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from nanocore.engine_core.grammars.token_matcher import CompiledGrammar
from nanocore.protocol.errors import InvalidRequestError
from tests.structured.walks import accepts, demo_tokens

FIGURES: Final = Path(__file__).parent / "schema_suite.json"
VERSION: Final = "4.26.0"
"""Of jsonschema, so that figures are of the same cases."""
OUTCOMES: Final = ("right", "refused", "valid_but_impossible", "invalid_but_possible")
MAX_SPELLINGS: Final = 200


def spellings(value: Any) -> Iterator[str]:
    """JSON texts of a value: its objects' properties in any order, 1.0 as 1, too."""
    if isinstance(value, float) and value.is_integer():
        yield str(int(value))
    if isinstance(value, dict) and value:
        for items in itertools.permutations(value.items()):
            members = ([f"{write(name)}:{text}" for text in spellings(one)] for name, one in items)
            yield from (f"{{{','.join(chosen)}}}" for chosen in itertools.product(*members))
    elif isinstance(value, list) and value:
        for chosen in itertools.product(*([*spellings(one)] for one in value)):
            yield f"[{','.join(chosen)}]"
    else:
        yield write(value)


def write(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def is_possible(grammar: CompiledGrammar, value: Any) -> bool:
    """Whether masks let a spelling of the value through."""
    encode = demo_tokens().tokenizer.encode
    texts = itertools.islice(spellings(value), MAX_SPELLINGS)
    return any(accepts(grammar, encode(text).ids) for text in texts)


def outcomes(case: dict[str, Any]) -> Iterator[str]:
    """What comes of each test of a case."""
    try:
        grammar = demo_tokens().compile(json=write(case["schema"]))
    except InvalidRequestError:
        yield from ["refused"] * len(case["tests"])
        return
    for test in case["tests"]:
        if is_possible(grammar, test["data"]) == test["valid"]:
            yield "right"
        else:
            yield "valid_but_impossible" if test["valid"] else "invalid_but_possible"


def measure(folder: Path) -> dict[str, dict[str, int]]:
    """How many tests of each file of draft 2020-12 come out how; folder: of the suite's tests."""
    figures = {}
    draft = folder / "draft2020-12"
    for path in sorted(draft.rglob("*.json")):
        cases = json.loads(path.read_text(encoding="utf-8"))
        counts = Counter(outcome for case in cases for outcome in outcomes(case))
        figures[path.relative_to(draft).as_posix()] = {
            outcome: counts[outcome] for outcome in OUTCOMES if counts[outcome]
        }
    return figures


def main() -> None:
    figures = measure(Path(sys.argv[1]))
    lines = (f"  {json.dumps(name)}: {json.dumps(counts)}" for name, counts in figures.items())
    FIGURES.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    print(sum((Counter(counts) for counts in figures.values()), Counter()))


if __name__ == "__main__":
    main()
