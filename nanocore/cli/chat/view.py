"""View: streams responses to the terminal, with notes and errors as lines of their own.

Nothing is written twice, so the terminal's scrollback is the conversation, even if the window is
resized. Control characters of models and servers are shown as escapes and have no effect.
"""

from __future__ import annotations

import asyncio
from typing import Final

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
_SPINNER_DELAY_S: Final = 0.5


class View:
    """Responses, notes and errors on a console."""

    def __init__(self, console: Console) -> None:
        self.console = console
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
        if not self._is_line_start:
            self._write("\n")

    def _write(self, text: str, style: str = _PLAIN) -> None:
        if text:
            self._stop_spinning()
            self._is_line_start = text.endswith("\n")
            line = StyledText(text, style, end="")
            self.console.print(line, end="", soft_wrap=True, highlight=False)
            self.console.file.flush()
