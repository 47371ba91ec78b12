"""View: streams responses to the terminal, with notes and errors as lines of their own.

Nothing is written twice, so the terminal's scrollback is the conversation, even if the window is
resized. Lines are broken between words, except in code. Control characters of models and servers
are shown as escapes and have no effect.
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

_PLAIN: Final = ""
_NOTE: Final = "dim"
_ERROR: Final = "red"
_UPDATE_S: Final = 0.2
_SPINNER_DELAY_S: Final = 0.5
_IDEOGRAPH: Final = r"[\u2e80-\ua4cf\uf900-\ufaff\uff00-\uff60\U00020000-\U0003fffd]"
_WORD: Final = re.compile(rf"\n|[^\S\n]+|{_IDEOGRAPH}|(?:(?!{_IDEOGRAPH})\S)+")
_BREAK: Final = re.compile(rf"\s|{_IDEOGRAPH}")
_MAX_WORD_COLUMNS: Final = 24


class WordWrap:
    """Breaks the lines of a stream between words, but not those of code between Markdown's fences.

    A word is held back only if it begins near the end of a line, until it is known whether it fits.
    Words longer than _MAX_WORD_COLUMNS are left to the terminal. num_columns: of the terminal.
    """

    def __init__(self, num_columns: Callable[[], int]) -> None:
        self._num_columns = num_columns
        self._column = 0
        self._ready = ""
        self._blanks = ""  # held back, before the word
        self._word = ""  # held back
        self._is_in_word = False  # the beginning of the word was written
        self._line = ""
        self._is_fenced = False

    def feed(self, text: str) -> str:
        """Return what can be written now."""
        for token in _WORD.findall(text):
            self._take(token)
        return self._taken()

    def end(self) -> str:
        """Return what was held back."""
        self._end_word()
        return self._taken()

    def _taken(self) -> str:
        ready, self._ready = self._ready, ""
        return ready

    def _take(self, token: str) -> None:
        if _BREAK.match(token):
            self._end_word()
        if token == "\n" or self._is_in_word or self._is_fenced:
            self._write(token)
        elif token.isspace():
            self._blanks += token
        else:
            self._word += token
            start = self._column + cell_len(self._blanks)
            surely_fits = start + _MAX_WORD_COLUMNS <= self._num_columns()
            if surely_fits or cell_len(self._word) > _MAX_WORD_COLUMNS:
                self._write_held()
                self._is_in_word = True

    def _end_word(self) -> None:
        end = self._column + cell_len(self._blanks) + cell_len(self._word)
        if self._column and end > self._num_columns():
            self._blanks = "\n" if self._word else ""
        self._write_held()
        self._is_in_word = False

    def _write_held(self) -> None:
        held = self._blanks + self._word
        self._blanks = self._word = ""
        self._write(held)

    def _write(self, text: str) -> None:
        self._ready += text
        _, line_end, last = text.rpartition("\n")
        if line_end:
            self._is_fenced ^= self._line.lstrip().startswith("```")
            self._line, self._column = "", 0
        self._line += last
        self._column += cell_len(last)
        if self._column > (num_columns := self._num_columns()):  # the terminal has broken the line
            self._column = (self._column - 1) % num_columns + 1


class View:
    """Responses, notes and errors on a console."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._wrap = WordWrap(lambda: max(1, console.width))
        self._style = _PLAIN
        self._kind: type | None = None  # style of the current part of the response
        self._is_line_start = True
        self._timer: asyncio.TimerHandle | None = None
        self._spinner: Status | None = None

    def show(self, event: TargetEvent) -> None:
        """Write an event of a response."""
        if isinstance(event, (Text, Reasoning, ToolBegin, ToolArguments)):
            kind = ToolBegin if isinstance(event, ToolArguments) else type(event)
            if kind is not self._kind or isinstance(event, ToolBegin):
                self._end_line()
                self._kind = kind
        if isinstance(event, Text):
            self._write(harmless(event.delta))
        elif isinstance(event, (Reasoning, ToolArguments)):
            self._write(harmless(event.delta), _NOTE)
        elif isinstance(event, ToolBegin):
            self._write(harmless(f"calls {event.name} "), _NOTE)
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
        self._end_line()
        self._kind = None

    def note(self, text: str) -> None:
        """Write a line in parentheses; a response may continue after it."""
        self._end_line()
        self._write(f"({harmless(text)})\n", _NOTE)

    def say(self, text: str) -> None:
        """Write the output of a command."""
        self._end_line()
        self._write(f"{harmless(text)}\n")

    def error(self, text: str) -> None:
        """Write one line, and end the response."""
        self.end_answer()
        self._write(f"{harmless(' '.join(text.split()))}\n", _ERROR)

    def _spin(self) -> None:
        self._spinner = self.console.status("", spinner="line")
        self._spinner.start()

    def _stop_spinning(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._spinner is not None:
            self._spinner.stop()
        self._timer = self._spinner = None

    def _end_line(self) -> None:
        self._print(self._wrap.end())
        if not self._is_line_start:
            self._write("\n")

    def _write(self, text: str, style: str = _PLAIN) -> None:
        if style != self._style:
            self._print(self._wrap.end())
            self._style = style
        self._print(self._wrap.feed(text))

    def _print(self, text: str) -> None:
        if text:
            self._stop_spinning()
            self._is_line_start = text.endswith("\n")
            line = StyledText(text, self._style, end="")
            self.console.print(line, end="", soft_wrap=True, highlight=False)
            self.console.file.flush()
