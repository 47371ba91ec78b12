"""The page of which features are tested together, from the tests that features.toml names."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations, product
from pathlib import Path
from string import ascii_uppercase
from typing import Any

from tools.reference.markdown import item, page, wrapped

SOURCE = Path(__file__).parent / "features.toml"
_ABOUT = (
    "Which pairs of features work together: `+` if a test shows that they do, `x` if a test shows "
    "that they are refused together, `.` if the pair is untested. Columns have the letters of the "
    "rows; a pair is in the row of its later letter. A feature's section names its tests with the "
    "features below it. Tests use fake devices; [gpu.md](gpu.md) lists what ran on GPUs."
)


@dataclass(frozen=True)
class Evidence:
    """A test, and whether it shows two features together or that they are refused."""

    test: str
    is_refusal: bool


Pair = frozenset[str]


def features() -> dict[str, tuple[str, str]]:
    """(name, what it is) by key."""
    return {key: (name, text) for key, (name, text) in _source()["features"].items()}


def evidence() -> dict[Pair, Evidence]:
    """By two features; of several tests the first."""
    found: dict[Pair, Evidence] = {}
    source = _source()
    for kind in ("refuses", "shows"):
        for entry in source[kind]:
            for pair in _pairs(entry):
                found.setdefault(pair, Evidence(entry["test"], kind == "refuses"))
    return found


def features_page() -> str:
    """The page."""
    known, names = evidence(), features()
    parts = [wrapped(_ABOUT), _triangle(known, names)]
    lines = [
        item(f"{letter} {name}: {what}.")
        for letter, (name, what) in zip(ascii_uppercase, names.values(), strict=False)
    ]
    parts.append("\n".join(lines))
    for key, (name, _) in names.items():
        if lines := _lines(key, known, names):
            parts += [f"## {name[0].upper()}{name[1:]}", "\n".join(lines)]
    return page("Compatibility matrix", *parts)


def _triangle(known: dict[Pair, Evidence], names: dict[str, tuple[str, str]]) -> str:
    """Each pair once, as text of one width: a table's cells would be wider than pages are."""
    width = max(len(name) for name, _ in names.values())
    letters = ascii_uppercase[: len(names)]
    lines = [" ".join(["  ".ljust(width + 2), *letters])]
    for i, (key, (name, _)) in enumerate(names.items()):
        marks = [_mark(known.get(frozenset((key, other)))) for other in list(names)[:i]]
        lines.append(" ".join([f"{letters[i]} {name.ljust(width)}", *marks, letters[i]]))
    return "\n".join(["<!-- not run: generated from the evidence -->", "```text", *lines, "```"])


def _source() -> dict[str, Any]:
    return tomllib.loads(SOURCE.read_text("utf-8"))


def _pairs(entry: dict[str, Any]) -> Iterator[Pair]:
    yield from map(frozenset, combinations(entry.get("together", []), 2))
    yield from map(frozenset, product(entry.get("these", []), entry.get("with", [])))


def _mark(found: Evidence | None) -> str:
    if found is None:
        return "."
    return "x" if found.is_refusal else "+"


def _lines(key: str, known: dict[Pair, Evidence], names: dict[str, tuple[str, str]]) -> list[str]:
    """Each test of this feature with later ones, and which; earlier ones have theirs."""
    by_test: dict[Evidence, list[str]] = {}
    for other in list(names)[list(names).index(key) + 1 :]:
        if (found := known.get(frozenset((key, other)))) is not None:
            by_test.setdefault(found, []).append(names[other][0])
    lines = []
    for found, others in by_test.items():
        file, _, function = found.test.partition("::")
        words = "not with" if found.is_refusal else "with"
        lines.append(item(f"{words} {', '.join(others)}: [`{function}`](../{file})"))
    return lines
