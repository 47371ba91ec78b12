"""The fenced blocks of a document, with their markers; CONTRIBUTING.md says what markers there are.

A block is run, parsed, written to a file, or says why not: `uncovered` finds those of which none is
true. Nothing is run here.
"""

from __future__ import annotations

import json
import re
import textwrap
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[2]
MARKERS = ("not run", "run by", "background", "file", "exit code")
PROGRAMS = ("python", "sh")
_FENCE = re.compile(r"^( *)(`{3,})(\S*)[^\n]*\n(.*?)^\1\2 *$", re.MULTILINE | re.DOTALL)
_COMMENT = re.compile(r"^ *<!-- ([a-z ]+): (.+) -->$")


@dataclass
class Block:
    """One of them.

    line: of its fence, from 1. is_output: text that says what the block before it prints, which
    `prints` of that one is, too.
    """

    page: str
    line: int
    language: str
    text: str
    markers: dict[str, str] = field(default_factory=dict)
    is_output: bool = False
    prints: str | None = None

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def is_run(self) -> bool:
        """Whether the runner of pages runs it."""
        is_other = self.markers.keys() & {"not run", "run by", "file"}
        return self.language in PROGRAMS and not is_other


def documents() -> list[str]:
    """Those whose blocks are all run, parsed or marked."""
    pages = [ROOT / "README.md", *ROOT.glob("docs/*.md"), *ROOT.glob("docs/recipes/*.md")]
    return sorted(path.relative_to(ROOT).as_posix() for path in pages)


def blocks(page: str) -> list[Block]:
    """In the order of the page. page: its path from the root."""
    return read_blocks((ROOT / page).read_text("utf-8"), page)


def read_blocks(text: str, page: str) -> list[Block]:
    """Those of a text."""
    found: list[Block] = []
    end = 0
    for match in _FENCE.finditer(text):
        between, end = text[end : match.start()], match.end()
        source = textwrap.dedent(match[4]) if match[1] else match[4]
        line = text.count("\n", 0, match.start()) + 1
        block = Block(page, line, match[3], source, _markers(between))
        if block.language == "text" and found and not between.strip():
            before = found[-1]
            if before.language in PROGRAMS:
                block.is_output, before.prints = True, block.text
        found.append(block)
    return found


def _markers(before: str) -> dict[str, str]:
    """Of the comments that end what stands before a fence."""
    found: dict[str, str] = {}
    for line in reversed(before.rstrip("\n").split("\n")):
        comment = _COMMENT.match(line)
        if comment is None:
            return found
        found[comment[1]] = comment[2]
    return found


def uncovered(block: Block) -> str | None:
    """What is wrong with it: nobody runs or parses it, or a marker is none; None: nothing."""
    marks = block.markers
    if "run by" in marks and not _test_exists(marks["run by"]):
        return f"{block}: there is no test {marks['run by']}"
    if "not run" in marks and len(marks["not run"].split()) < 2:
        return f"{block}: say why it is not run"
    if not marks.get("exit code", "0").isdigit():
        return f"{block}: {marks['exit code']} is no exit code"
    if "background" in marks and block.language != "sh":
        return f"{block}: only a command of sh stays in the background"
    if marks.keys() & {"not run", "run by", "file"} or block.is_run or block.is_output:
        return None
    if block.language in _PARSERS:
        return _parse_problem(block)
    return f"{block}: a block of {block.language or 'no language'} that is neither run nor marked"


def _test_exists(name: str) -> bool:
    file, _, function = name.partition("::")
    path = ROOT / file
    return (
        path.is_file()
        and re.search(rf"^def {re.escape(function)}\(", path.read_text(), re.M) is not None
    )


def _parse_problem(block: Block) -> str | None:
    try:
        _PARSERS[block.language](block.text)
    except (ValueError, yaml.YAMLError) as error:
        return f"{block}: {str(error).splitlines()[0]}"
    return None


def _json_lines(text: str) -> None:
    for line in text.splitlines():
        json.loads(line)


def _yaml(text: str) -> None:
    list(yaml.safe_load_all(text))


_PARSERS: dict[str, Callable[[str], object]] = {
    "json": json.loads,
    "jsonl": _json_lines,
    "yaml": _yaml,
    "toml": tomllib.loads,
}


def all_blocks() -> Iterator[Block]:
    """Of all documents."""
    for page in documents():
        yield from blocks(page)
