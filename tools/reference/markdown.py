"""Markdown as the house has it: prose wrapped at 120 characters, and items of lists."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Sequence

WIDTH = 120
NOTE = "<!-- Made from the code by `python -m tools.reference`; a test compares. -->"


def wrapped(text: str, first: str = "", rest: str = "") -> str:
    """A paragraph, or an item of a list; what stands between backticks is not broken."""
    words = re.sub(r"`[^`]+`", lambda span: span[0].replace(" ", "\0"), " ".join(text.split()))
    lines = textwrap.wrap(
        words,
        WIDTH,
        initial_indent=first,
        subsequent_indent=rest,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return "\n".join(lines).replace("\0", " ")


def item(text: str) -> str:
    """Of a list."""
    return wrapped(text, "- ", "  ")


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """With cells as they are, but for bars."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(
        "| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines
    )


def page(title: str, *parts: str) -> str:
    """A whole document, of paragraphs, lists and tables."""
    return "\n\n".join([f"# {title}", NOTE, *(part for part in parts if part)]) + "\n"
