"""Markdown with a style, as it streams: what has been written is never written again.

The marks stay, so that what is copied is what the model wrote; headings, code and what is bold look
so. Whatever a mark needs to be known as one is held back: two characters at most, and the blanks
that begin a line. Styles of a line end with it, but for code between fences.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

PLAIN: Final = ""
BOLD: Final = "bold"
CODE: Final = "cyan"
_HEADING: Final = re.compile(r"#{1,6}(?: |$)")
_RUN: Final = re.compile(r"[^\n*`]+")

Piece = tuple[str, str]
"""(a text, its style)"""


class MarkupStream:
    """One text."""

    def __init__(self) -> None:
        self._held = ""
        self._begin()

    def _begin(self) -> None:
        self._is_line_start = True
        self._is_fenced = False
        self._line_style = PLAIN
        self._is_bold = False
        self._is_code = False

    def feed(self, text: str) -> list[Piece]:
        """What can be written now."""
        return list(self._take(text, is_end=False))

    def finish(self) -> list[Piece]:
        """The rest; a text that comes then is a new one."""
        pieces = list(self._take("", is_end=True))
        self._begin()
        return pieces

    def _take(self, text: str, is_end: bool) -> Iterator[Piece]:
        rest = self._held + text
        while rest:
            if self._is_line_start and not self._begin_line(rest, is_end):
                break
            num_chars = self._num_styled(rest, is_end)
            if not num_chars:
                break
            style = self._style
            piece, rest = rest[:num_chars], rest[num_chars:]
            if piece == "\n":
                self._is_line_start, self._line_style = True, PLAIN
                self._is_bold = self._is_code = False
                style = PLAIN
            elif piece == "`" and not self._line_style:
                self._is_code = not self._is_code
                style = CODE
            elif piece == "**" and not self._line_style and not self._is_code:
                self._is_bold = not self._is_bold
                style = BOLD
            yield piece, style
        self._held = rest

    @property
    def _style(self) -> str:
        if self._line_style:
            return self._line_style
        return CODE if self._is_code else BOLD if self._is_bold else PLAIN

    def _begin_line(self, rest: str, is_end: bool) -> bool:
        """See what line it is; False: that is not known yet."""
        begun = rest.lstrip(" ")
        mark = begun[:3]
        if not is_end and (not begun or (len(mark) < 3 and mark == "`" * len(mark))):
            return False
        if not is_end and re.fullmatch("#{1,6}", begun):
            return False
        self._is_line_start = False
        if mark == "```":
            self._is_fenced = not self._is_fenced
            self._line_style = CODE
        elif self._is_fenced:
            self._line_style = CODE
        elif _HEADING.match(begun):
            self._line_style = BOLD
        return True

    def _num_styled(self, rest: str, is_end: bool) -> int:
        """Of how many characters the style is known."""
        if run := _RUN.match(rest):
            return run.end()
        if rest[0] != "*" or self._line_style or self._is_code:
            return 1
        if len(rest) < 3 and not is_end and "\n" not in rest:
            return 0 if rest in ("*", "**") else 1
        if not rest.startswith("**"):
            return 1
        opens = len(rest) > 2 and not rest[2].isspace()
        return 2 if self._is_bold or opens else 1
