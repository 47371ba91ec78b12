"""Every block of the documents is run, parsed or says why not; and what finds out about it."""

from __future__ import annotations

import pytest

from tests.docs.blocks import MARKERS, Block, all_blocks, documents, read_blocks, uncovered
from tests.docs.output import is_as_said


@pytest.mark.parametrize("page", documents())
def test_every_block_is_run_or_parsed_or_says_why_not(page: str) -> None:
    ours = [block for block in all_blocks() if block.page == page]
    assert [problem for block in ours if (problem := uncovered(block))] == []


def test_no_marker_is_misspelt() -> None:
    """One that is none would be taken for a remark, and its block be run."""
    known = {*MARKERS, "example"}
    assert {name for block in all_blocks() for name in block.markers} <= known


def only(text: str) -> Block:
    (block,) = read_blocks(text, "page.md")
    return block


@pytest.mark.parametrize(
    "text",
    [
        "```\nls\n```\n",
        "```text\na picture\n```\n",
        "```cpp\nint a;\n```\n",
        "```json\n{\n```\n",
        "```jsonl\n{}\n[\n```\n",
        "```yaml\na: [\n```\n",
        "```toml\na\n```\n",
        "<!-- not run: because -->\n```sh\nls\n```\n",
        "<!-- run by: tests/docs/test_blocks.py::test_none -->\n```sh\nls\n```\n",
        "<!-- run by: tests/none.py::test_none -->\n```sh\nls\n```\n",
        "<!-- exit code: one -->\n```sh\nls\n```\n",
        "<!-- background: ready -->\n```python\nserve()\n```\n",
    ],
)
def test_a_block_that_nobody_looks_at_is_found(text: str) -> None:
    assert uncovered(only(text)) is not None


@pytest.mark.parametrize(
    "text",
    [
        "```sh\nls\n```\n",
        "   ```python\n   print()\n   ```\n",
        "```json\n{}\n```\n",
        "<!-- not run: needs a GPU -->\n```text\na picture\n```\n",
        "<!-- file: main.cpp -->\n```cpp\nint a;\n```\n",
        "<!-- run by: tests/docs/test_blocks.py::test_no_marker_is_misspelt -->\n```\nls\n```\n",
    ],
)
def test_a_block_that_somebody_looks_at_is_left_alone(text: str) -> None:
    assert uncovered(only(text)) is None


def test_markers_stand_directly_before_their_block() -> None:
    text = "<!-- not run: too far away -->\n\nWords.\n\n<!-- exit code: 2 -->\n```sh\nls\n```\n"
    assert only(text).markers == {"exit code": "2"}
    several = "<!-- exit code: 2 -->\n<!-- file: a -->\n```sh\nls\n```\n"
    assert only(several).markers == {"exit code": "2", "file": "a"}


def test_text_after_a_program_is_what_it_prints_if_nothing_stands_between() -> None:
    program, output = read_blocks("```sh\nls\n```\n\n```text\na\n```\n", "page.md")
    assert (program.prints, output.is_output) == ("a\n", True)
    program, text = read_blocks("```sh\nls\n```\n\nIts log:\n\n```text\na\n```\n", "page.md")
    assert (program.prints, text.is_output) == (None, False)


def test_blocks_of_lists_lose_their_indent() -> None:
    assert only("1. First:\n\n   ```sh\n   if a; then\n     b\n   fi\n   ```\n").text == (
        "if a; then\n  b\nfi\n"
    )


@pytest.mark.parametrize(
    ("printed", "expected", "is_same"),
    [
        ("a\nb\n", "a\nb\n", True),
        ("a  \nb\n\n", "a\nb\n", True),
        ("a\nb\n", "a\n", False),
        ("a\n", "a\nb\n", False),
        ("took 3.1 s\n", "took … s\n", True),
        ("took 3.1 s\nand more\n", "took … s\n", False),
        ("a\nb\nc\nd\n", "a\n…\nd\n", True),
        ("a\nd\n", "a\n  …\nd\n", True),
        ("a\nb\nc\n", "a\n…\n", True),
        ("b\nc\n", "a\n…\n", False),
        ("a.c\n", "abc\n", False),
        ("abc\n", "a.c\n", False),
    ],
)
def test_dots_stand_for_what_differs(printed: str, expected: str, is_same: bool) -> None:
    assert is_as_said(printed, expected) is is_same
