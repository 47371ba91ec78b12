"""The page of which features are tested together, from the tests that features.toml names."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations, product
from pathlib import Path
from typing import Any

from tools.reference.markdown import item, page, table, wrapped

SOURCE = Path(__file__).parent / "features.toml"
_ABOUT = (
    "Which two features are known to work together: + where a test shows it, **no** where they are "
    "not to be had together and a test says so, and - where nobody has tried. Each + leads "
    "to the row's feature, below, where the tests are named. What is tested on a fake device "
    "has not been seen on a GPU ([GPUs](gpu.md))."
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
    keys = list(names)
    letters = dict(zip(keys, (chr(ord("A") + i) for i in range(len(keys))), strict=True))
    rows = []
    for i, key in enumerate(keys[1:], 1):
        cells = [_cell(known.get(frozenset((key, other))), names[key][0]) for other in keys[:i]]
        rows.append([f"{letters[key]} {names[key][0]}", *cells, *[""] * (len(keys) - 1 - i)])
    head = ["", *(letters[key] for key in keys[:-1])]
    legend = item(f"A {names[keys[0]][0]}: {names[keys[0]][1]}.")
    legend += "".join(f"\n{item(f'{letters[k]} {names[k][0]}: {names[k][1]}.')}" for k in keys[1:])
    parts = [wrapped(_ABOUT), table(head, rows), legend]
    for key in keys:
        name = names[key][0]
        parts += [f"## {name[0].upper()}{name[1:]}", "\n".join(_lines(key, known, names))]
    return page("Features together", *parts)


def _source() -> dict[str, Any]:
    return tomllib.loads(SOURCE.read_text("utf-8"))


def _pairs(entry: dict[str, Any]) -> Iterator[Pair]:
    yield from map(frozenset, combinations(entry.get("together", []), 2))
    yield from map(frozenset, product(entry.get("these", []), entry.get("with", [])))


def _cell(found: Evidence | None, name: str) -> str:
    if found is None:
        return "-"
    anchor = name.lower().replace(",", "").replace(" ", "-")
    return "**no**" if found.is_refusal else f"[+](#{anchor})"


def _lines(key: str, known: dict[Pair, Evidence], names: dict[str, tuple[str, str]]) -> list[str]:
    """Of each test that says something of this feature, the features that it is with."""
    by_test: dict[Evidence, list[str]] = {}
    for other in names:
        if (found := known.get(frozenset((key, other)))) is not None:
            by_test.setdefault(found, []).append(names[other][0])
    lines = []
    for found, others in by_test.items():
        file, _, function = found.test.partition("::")
        words = "not with" if found.is_refusal else "with"
        lines.append(item(f"{words} {', '.join(others)}: [`{function}`](../{file})"))
    return lines
