"""What the user sees: answers as they stream, notes beside them, errors in a line.

Nothing that is written is written again, so the terminal's scrollback is the conversation, however
wide its window becomes. What a model or a server says reaches the terminal without its control
characters: they are shown, and do nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Final

from rich.console import Console
from rich.status import Status
from rich.text import Text as StyledText

from nanocore.cli.chat.markup import MarkupStream, Piece
from nanocore.cli.chat.target import Resumed, TargetEvent
from nanocore.cli.chat.turn import Figures
from nanocore.client.chat.events import Reasoning, Text, ToolArguments, ToolBegin
from nanocore.system.standard_streams import harmless

_UPDATE_S: Final = 0.2
_PATIENCE_S: Final = 0.5
_NOTE: Final = "dim"
_ERROR: Final = "red"


class View:
    """Writes to a console. is_plain: without styles for Markdown."""

    def __init__(self, console: Console, is_plain: bool = False) -> None:
        self.console = console
        self._markup = None if is_plain else MarkupStream()
        self._kind: type | None = None  # of what the answer is in the midst of
        self._is_line_start = True
        self._timer: asyncio.TimerHandle | None = None
        self._spinner: Status | None = None

    def show(self, event: TargetEvent) -> None:
        """More of an answer."""
        if isinstance(event, (Text, Reasoning, ToolBegin, ToolArguments)):
            kind = ToolBegin if isinstance(event, ToolArguments) else type(event)
            if kind is not self._kind or isinstance(event, ToolBegin):
                self._end_part()
                self._kind = kind
        if isinstance(event, Text):
            text = harmless(event.delta)
            pieces = [(text, "")] if self._markup is None else self._markup.feed(text)
            self._write(pieces)
        elif isinstance(event, Reasoning):
            self._write([(harmless(event.delta), _NOTE)])
        elif isinstance(event, ToolBegin):
            self._write([(harmless(f"calls {event.name} "), _NOTE)])
        elif isinstance(event, ToolArguments):
            self._write([(harmless(event.delta), _NOTE)])
        elif isinstance(event, Resumed):
            how = "" if event.is_exact else ", perhaps in other words"
            self.note(f"another engine goes on behind {event.num_output_tokens} tokens{how}")

    @asynccontextmanager
    async def waiting(self, news: Callable[[], str]) -> AsyncIterator[None]:
        """Show that something takes its time, and what it last said of itself."""

        async def update() -> None:
            while True:
                room = max(0, self.console.width - 4)
                spinner.update(StyledText(harmless(news())[:room]))
                await asyncio.sleep(_UPDATE_S)

        with self.console.status("", spinner="line") as spinner:
            task = asyncio.create_task(update())
            try:
                yield
            finally:
                task.cancel()

    def begin_answer(self) -> None:
        """It is asked for, and may take its time."""
        self._timer = asyncio.get_running_loop().call_later(_PATIENCE_S, self._spin)

    def end_answer(self) -> None:
        """Nothing more of it comes."""
        self._stop_spinning()
        self._end_part()
        self._kind = None

    def note(self, text: str) -> None:
        """A line that is not the model's. Within an answer that goes on behind it."""
        self._end_line()
        self._write([(f"({harmless(text)})\n", _NOTE)])

    def say(self, text: str) -> None:
        """What was asked of the command."""
        self._end_line()
        self._write([(f"{harmless(text)}\n", "")])

    def error(self, text: str) -> None:
        """What went wrong, in a line."""
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
        if self._markup is not None:
            self._write(self._markup.finish())
        self._end_line()

    def _end_line(self) -> None:
        if not self._is_line_start:
            self._write([("\n", "")])

    def _write(self, pieces: list[Piece]) -> None:
        line = StyledText(end="")
        for text, style in pieces:
            line.append(text, style)
        if line.plain:
            self._stop_spinning()
            self._is_line_start = line.plain.endswith("\n")
            self.console.print(line, end="", soft_wrap=True, highlight=False)
            self.console.file.flush()


def status(model: str, figures: Figures, max_model_len: int | None, num_columns: int) -> str:
    """A line of what is known: as much of it as there is room for, the model first."""
    parts = [harmless(model).rstrip("/").rpartition("/")[2] or "no model"]
    used = figures.num_context_tokens
    if used is not None:
        most = "" if max_model_len is None else f"/{max_model_len:,}"
        parts.append(f"context {used:,}{most}")
    if figures.tokens_per_s is not None:
        parts.append(f"{figures.tokens_per_s:,.0f} tokens/s")
    if figures.ttft_s is not None:
        parts.append(f"first {figures.ttft_s * 1e3:,.0f} ms")
    if figures.num_prompt_tokens is not None:
        cached = f" ({figures.num_cached_tokens:,} cached)" if figures.num_cached_tokens else ""
        parts.append(f"prompt {figures.num_prompt_tokens:,}{cached}")
    line = parts[0]
    for part in parts[1:]:
        if len(line) + len(part) + 3 > num_columns:
            break
        line += f" | {part}"
    return line[:num_columns]
