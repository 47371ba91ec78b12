"""View: streams responses to the terminal, with notes and errors as lines of their own.

Nothing is written twice, so the terminal's scrollback is the conversation, even if the window is
resized. Lines are broken between words, except in code. Markdown keeps its marks, so that copied
text is the model's text. Control characters of models and servers are shown as escapes and have no
effect.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Final

from rich.cells import cell_len
from rich.console import Console
from rich.status import Status
from rich.text import Text as StyledText

from nanocore.cli.chat.target import Resumed, TargetEvent
from nanocore.client.chat.events import Reasoning, Text, ToolArguments, ToolBegin
from nanocore.protocol.errors import counted
from nanocore.system.standard_streams import harmless

PLAIN: Final = ""
BOLD: Final = "bold"
CODE: Final = "cyan"
FENCED: Final = "cyan not bold"
"""Code between fences, which looks like other code, and whose lines are not broken."""
_NOTE: Final = "dim"
_ERROR: Final = "red"
_UPDATE_S: Final = 0.2
_SPINNER_DELAY_S: Final = 0.5
_TOKEN: Final = re.compile(r"\n|```|`|#{1,6} |\*\*|[^\n`#*]+|.")
_IDEOGRAPH: Final = r"[\u2e80-\ua4cf\uf900-\ufaff\uff00-\uff60\U00020000-\U0003fffd]"
_WORD: Final = re.compile(rf"\n|[^\S\n]+|{_IDEOGRAPH}|(?:(?!{_IDEOGRAPH})\S)+")
_BREAK: Final = re.compile(rf"\s|{_IDEOGRAPH}")
_MAX_WORD_COLUMNS: Final = 24
_UNDECIDED: Final = re.compile(r"(?:(?<!`)`{1,2}|(?<!#)#{1,6}|(?<!\*)\*{1,2})\Z")
"""A mark at the end of a delta that the next one may change."""

Piece = tuple[str, str]
"""(a text, its style)"""


class MarkdownStyles:
    """Styles a stream of Markdown: headings, bold, and code inline or between fences."""

    def __init__(self) -> None:
        self._held = ""
        self._is_fenced = False
        self._begin_line()

    def _begin_line(self) -> None:
        self._is_line_start = True
        self._line_style = FENCED if self._is_fenced else PLAIN
        self._span_style = PLAIN

    def feed(self, text: str, is_end: bool = False) -> list[Piece]:
        """Return what can be written now; `is_end` flushes, and begins a new text."""
        text = self._held + text
        undecided = None if is_end else _UNDECIDED.search(text)
        cut = undecided.start() if undecided else len(text)
        pieces = []
        for found in _TOKEN.finditer(text):
            if found.start() >= cut:
                break
            pieces.append((found[0], self._style(found[0], text[found.end() : found.end() + 1])))
        self._held = text[cut:]
        if is_end:
            self._is_fenced = False
            self._begin_line()
        return pieces

    def _style(self, token: str, following: str) -> str:
        """Return a token's style, and note what it begins or ends. following: the next character,
        which tells the ** of bold text from that of `2 ** 3`."""
        if token == "\n":
            self._begin_line()
            return PLAIN
        if self._is_line_start and token == "```":
            self._is_fenced = not self._is_fenced
            self._line_style = FENCED
        elif self._is_line_start and token[0] == "#" and token[-1] == " " and not self._line_style:
            self._line_style = BOLD
        self._is_line_start &= token.isspace()
        if self._line_style:
            return self._line_style
        before, mark = self._span_style, {"`": CODE, "**": BOLD}.get(token)
        if mark is not None and before == mark:
            self._span_style = PLAIN
        elif mark is not None and not before and (mark == CODE or following.strip()):
            self._span_style = mark
        return before or self._span_style


class WordWrap:
    """Breaks the lines of a stream between words.

    A word is held back only if it begins near the end of a line, until it is known whether it fits.
    Words longer than _MAX_WORD_COLUMNS are left to the terminal. num_columns: of the terminal.
    """

    def __init__(self, num_columns: Callable[[], int]) -> None:
        self._num_columns = num_columns
        self._column = 0
        self._ready: list[Piece] = []
        self._blanks: list[Piece] = []  # held back, before the word
        self._word: list[Piece] = []  # held back
        self._is_in_word = False  # the beginning of the word was written

    def feed(self, pieces: list[Piece]) -> list[Piece]:
        """Return what can be written now."""
        for text, style in pieces:
            if style == FENCED:
                self._end_word()
                self._write(text, style)
                continue
            for token in _WORD.findall(text):
                self._take(token, style)
        return self._taken()

    def end(self) -> list[Piece]:
        """Return what was held back."""
        self._end_word()
        return self._taken()

    def _taken(self) -> list[Piece]:
        ready, self._ready = self._ready, []
        return ready

    def _take(self, token: str, style: str) -> None:
        if _BREAK.match(token):
            self._end_word()
        if token == "\n" or self._is_in_word:
            self._write(token, style)
        elif token.isspace():
            self._blanks.append((token, style))
        else:
            self._word.append((token, style))
            start = self._column + _width(self._blanks)
            surely_fits = start + _MAX_WORD_COLUMNS <= self._num_columns()
            if surely_fits or _width(self._word) > _MAX_WORD_COLUMNS:
                self._write_held()
                self._is_in_word = True

    def _end_word(self) -> None:
        end = self._column + _width(self._blanks) + _width(self._word)
        if self._column and end > self._num_columns():
            self._blanks = [("\n", PLAIN)] if self._word else []
        self._write_held()
        self._is_in_word = False

    def _write_held(self) -> None:
        held = [*self._blanks, *self._word]
        self._blanks, self._word = [], []
        for text, style in held:
            self._write(text, style)

    def _write(self, text: str, style: str) -> None:
        if self._ready and self._ready[-1][1] == style:
            self._ready[-1] = (self._ready[-1][0] + text, style)
        else:
            self._ready.append((text, style))
        _, line_end, last = text.rpartition("\n")
        self._column = cell_len(last) + (0 if line_end else self._column)
        if self._column > (num_columns := self._num_columns()):  # the terminal has broken the line
            self._column = (self._column - 1) % num_columns + 1


def _width(pieces: list[Piece]) -> int:
    return sum(cell_len(text) for text, _ in pieces)


class View:
    """is_plain: without styles for Markdown."""

    def __init__(self, console: Console, is_plain: bool = False) -> None:
        self.console = console
        self._is_plain = is_plain
        self._styles = MarkdownStyles()
        self._wrap = WordWrap(lambda: max(1, console.width))
        self._kind: type | None = None  # style of the current part of the response
        self._is_line_start = True
        self._timer: asyncio.TimerHandle | None = None
        self._spinner: Status | None = None

    def show(self, event: TargetEvent) -> None:
        """Write an event of a response."""
        if isinstance(event, (Text, Reasoning, ToolBegin, ToolArguments)):
            kind = ToolBegin if isinstance(event, ToolArguments) else type(event)
            if kind is not self._kind or isinstance(event, ToolBegin):
                self._end_part()
                self._kind = kind
        if isinstance(event, Text):
            self._write(self._styles.feed(harmless(event.delta)))
        elif isinstance(event, (Reasoning, ToolArguments)):
            self._write([(harmless(event.delta), _NOTE)])
        elif isinstance(event, ToolBegin):
            self._write([(harmless(f"calls {event.name} "), _NOTE)])
        elif isinstance(event, Resumed):
            how = "" if event.is_exact else ", perhaps with other words"
            tokens = counted(event.num_output_tokens, "token")
            self.note(f"another engine continues after {tokens}{how}")

    @asynccontextmanager
    async def waiting(self, news: Callable[[], str]) -> AsyncIterator[None]:
        """Show a spinner with the latest news inside this block."""

        async def update() -> None:
            while True:
                num_columns = max(0, self.console.width - 4)
                spinner.update(StyledText(harmless(news())[:num_columns]))
                await asyncio.sleep(_UPDATE_S)

        with self.console.status("", spinner="line") as spinner:
            task = asyncio.create_task(update())
            try:
                yield
            finally:
                task.cancel()

    def begin_answer(self) -> None:
        """Show a spinner, unless the response begins soon."""
        self._timer = asyncio.get_running_loop().call_later(_SPINNER_DELAY_S, self._spin)

    def end_answer(self) -> None:
        self._stop_spinning()
        self._end_part()
        self._kind = None

    def note(self, text: str) -> None:
        """Write a line in parentheses; a response may continue after it."""
        self._end_line()
        self._write([(f"({harmless(text)})\n", _NOTE)])

    def say(self, text: str) -> None:
        """Write the output of a command."""
        self._end_line()
        self._write([(f"{harmless(text)}\n", PLAIN)])

    def error(self, text: str) -> None:
        """Write one line, and end the response."""
        self.end_answer()
        self._write([(f"{harmless(' '.join(text.split()))}\n", _ERROR)])

    def _spin(self) -> None:
        self._spinner = self.console.status("", spinner="line")
        self._spinner.start()

    def _stop_spinning(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._spinner is not None:
            self._spinner.stop()
        self._timer = self._spinner = None

    def _end_part(self) -> None:
        self._write(self._styles.feed("", is_end=True))
        self._end_line()

    def _end_line(self) -> None:
        self._print(self._wrap.end())
        if not self._is_line_start:
            self._write([("\n", PLAIN)])

    def _write(self, pieces: list[Piece]) -> None:
        self._print(self._wrap.feed(pieces))

    def _print(self, pieces: list[Piece]) -> None:
        line = StyledText(end="")
        for text, style in pieces:
            is_markdown = style in (BOLD, CODE, FENCED)
            line.append(text, PLAIN if self._is_plain and is_markdown else style)
        if line.plain:
            self._stop_spinning()
            self._is_line_start = line.plain.endswith("\n")
            self.console.print(line, end="", soft_wrap=True, highlight=False)
            self.console.file.flush()
