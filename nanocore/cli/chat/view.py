"""View: streams responses to the terminal, with notes and errors as lines of their own.

Nothing is written twice, so the terminal's scrollback is the conversation, even if the window is
resized. Markdown keeps its marks, so that copied text is the model's text. Control characters of
models and servers are shown as escapes and have no effect.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Final

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
_NOTE: Final = "dim"
_ERROR: Final = "red"
_UPDATE_S: Final = 0.2
_SPINNER_DELAY_S: Final = 0.5
_TOKEN: Final = re.compile(r"\n|```|`|#{1,6} |\*\*|[^\n`#*]+|.")
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
        self._line_style = CODE if self._is_fenced else PLAIN
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
            self._line_style = CODE
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


class View:
    """is_plain: without styles for Markdown."""

    def __init__(self, console: Console, is_plain: bool = False) -> None:
        self.console = console
        self._styles = None if is_plain else MarkdownStyles()
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
            text = harmless(event.delta)
            self._write([(text, PLAIN)] if self._styles is None else self._styles.feed(text))
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
        if self._styles is not None:
            self._write(self._styles.feed("", is_end=True))
        self._end_line()

    def _end_line(self) -> None:
        if not self._is_line_start:
            self._write([("\n", PLAIN)])

    def _write(self, pieces: list[Piece]) -> None:
        line = StyledText(end="")
        for text, style in pieces:
            line.append(text, style)
        if line.plain:
            self._stop_spinning()
            self._is_line_start = line.plain.endswith("\n")
            self.console.print(line, end="", soft_wrap=True, highlight=False)
            self.console.file.flush()
