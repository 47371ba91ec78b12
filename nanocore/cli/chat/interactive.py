"""The conversation at a terminal: prompt, history, completion and keys, by prompt_toolkit.

Enter sends; Alt-Enter, and Enter within pasted or quoted text, start a new line. Ctrl-C empties the
prompt.
"""

from __future__ import annotations

import asyncio
import os
import sys
import termios
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Final

from prompt_toolkit import PromptSession
from prompt_toolkit.application import run_in_terminal
from prompt_toolkit.completion import CompleteEvent, Completer, Completion, PathCompleter
from prompt_toolkit.document import Document
from prompt_toolkit.enums import DEFAULT_BUFFER
from prompt_toolkit.filters import Condition, has_focus
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.input import Input
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.keys import Keys
from prompt_toolkit.output import Output
from rich.console import Console

from nanocore.cli.chat.commands import ALIASES, COMMANDS, SAMPLING_NAMES, is_command
from nanocore.cli.chat.conversation import Conversation
from nanocore.cli.chat.files import ErrorLog, open_regular, replace_file, state_directory
from nanocore.cli.chat.flags import ChatSettings
from nanocore.cli.chat.loop import ChatLoop
from nanocore.cli.chat.session import WarningNotes, handled_by, opened
from nanocore.cli.chat.view import View
from nanocore.cli.interrupts import Interrupts
from nanocore.protocol.errors import ConfigError

PROMPT: Final = "> "
QUOTES: Final = '"""'
"""They enclose a text of several lines."""
MAX_ENTRIES: Final = 1000
MAX_ENTRY_CHARS: Final = 2**14


def converse(options: ChatSettings) -> int:
    """Hold a conversation; return the exit code.

    Raises:
        NanocoreError: the target cannot be opened.
    """
    interrupts = Interrupts()
    return asyncio.run(interrupts.run(_converse(options, interrupts)))


async def _converse(options: ChatSettings, interrupts: Interrupts) -> None:
    view = View(Console(), options.is_plain)
    # For the whole conversation: changing a terminal's mode between two keys may lose one.
    with quiet_keyboard(sys.stdin.fileno()):
        async with opened(options, view) as target:
            conversation = Conversation(options.system)
            loop = ChatLoop(target, conversation, dict(options.sampling), view, interrupts)
            history = input_history(view.note)
            prompt = Prompt(history, loop.status, lambda: loop.models, interrupts)
            view.note(f"{loop.status(sys.maxsize)}; /help lists commands, Ctrl-D ends")
            sampling = loop.sampling_in_force().replace("\n", "; ")
            view.note(f"{sampling}; /set NAME=VALUE changes them")
            notes = WarningNotes(lambda text: prompt.above(partial(view.note, text)))
            with handled_by(ErrorLog(), notes):
                await loop.run(prompt)


@contextmanager
def quiet_keyboard(fd: int) -> Iterator[None]:
    """Keep typed text from being echoed into a response; the next prompt reads it."""
    try:
        before = termios.tcgetattr(fd)
    except termios.error:  # not a terminal
        yield
        return
    quiet = [*before]
    quiet[3] &= ~(termios.ECHO | termios.ICANON)
    termios.tcsetattr(fd, termios.TCSANOW, quiet)
    try:
        yield
    finally:
        with suppress(termios.error):  # the terminal has hung up
            termios.tcsetattr(fd, termios.TCSANOW, before)


def input_history(complain: Callable[[str], None]) -> History:
    """Return the history in `chat-history`; if that cannot be used, complain and keep none."""
    try:
        path = state_directory() / "chat-history"
        return BoundedHistory(path)
    except ConfigError as error:
        complain(f"{error}: history is not saved")
    except OSError as error:
        complain(f"{path}: {error.strerror}: history is not saved")
    return InMemoryHistory()


class BoundedHistory(FileHistory):
    """A file of mode 0600 with the last entries; raises OSError if it cannot be used."""

    def __init__(self, path: Path) -> None:
        fd = open_regular(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW)
        with open(fd, "rb") as file:
            os.fchmod(fd, 0o600)
            # prompt_toolkit begins each entry with "# TIME", and each line of its text with "+".
            entries = file.read().split(b"\n# ")
        if len(entries) > 2 * MAX_ENTRIES:
            replace_file(path, b"\n# ".join([b"", *entries[-MAX_ENTRIES:]]))
        super().__init__(str(path))

    def store_string(self, string: str) -> None:
        if len(string) <= MAX_ENTRY_CHARS:
            with suppress(OSError):  # a full disk, say: the entry stays in memory
                super().store_string(string)


class Prompt:
    """Args:
    status: the line below, for a number of columns. models: completions of `/model`.
    input, output: the terminal's, unless a test has others.
    """

    def __init__(
        self,
        history: History,
        status: Callable[[int], str],
        models: Callable[[], Iterable[str]],
        interrupts: Interrupts,
        input: Input | None = None,
        output: Output | None = None,
    ) -> None:
        self._interrupts = interrupts
        self._session: PromptSession[str] = PromptSession(
            PROMPT,
            history=history,
            completer=CommandCompleter(models),
            complete_while_typing=Condition(lambda: is_command(self._session.default_buffer.text)),
            prompt_continuation=lambda width, line, soft: " " * width,
            key_bindings=_keys(),
            bottom_toolbar=lambda: status(self._session.output.get_size().columns),
            enable_history_search=False,
            input=input,
            output=output,
        )

    async def read(self) -> str:
        """Return the user's next text. Raises EOFError at the end."""
        with self._interrupts.to(self._session.default_buffer.reset):
            text = await self._session.prompt_async(handle_sigint=False)
        # The terminal sends UTF-8, independently of the locale's encoding.
        text = text.encode(errors="surrogateescape").decode(errors="replace")
        is_quoted = text.startswith(QUOTES) and text.rstrip().endswith(QUOTES)
        if is_quoted and text.count(QUOTES) == 2:
            return text.strip().removeprefix(QUOTES).removesuffix(QUOTES).strip("\n")
        return text

    def above(self, write: Callable[[], None]) -> None:
        """Call `write`; its output goes above the prompt, if one is shown."""
        if self._session.app.is_running:
            run_in_terminal(write)  # the application awaits it before it ends
        else:
            write()


class CommandCompleter(Completer):
    """Completes commands and their arguments, but nothing in messages."""

    def __init__(self, models: Callable[[], Iterable[str]]) -> None:
        self._models = models
        self._paths = PathCompleter(expanduser=True)

    def get_completions(
        self, document: Document, complete_event: CompleteEvent
    ) -> Iterable[Completion]:
        text = document.text_before_cursor
        if not text.startswith("/") or "\n" in text:
            return
        name, blank, argument = text[1:].partition(" ")
        if not blank:
            for known in (*COMMANDS, *ALIASES):
                if known.startswith(name):
                    meaning = COMMANDS[ALIASES.get(known, known)].meaning
                    yield Completion(known, -len(name), display=f"/{known}", display_meta=meaning)
        elif name in ("save", "load") or (name == "model" and argument[:1] in ("/", ".", "~")):
            yield from self._paths.get_completions(Document(argument), complete_event)
        else:
            values = {"set": SAMPLING_NAMES, "model": self._models()}.get(name, ())
            for value in values:
                if value.startswith(argument):
                    yield Completion(value, -len(argument))


def _keys() -> KeyBindings:
    keys = KeyBindings()
    is_typing = has_focus(DEFAULT_BUFFER)  # not in the search field

    @keys.add("enter", filter=is_typing)
    def _enter(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        # Keys that arrive together are pasted into a terminal without bracketed paste; nobody types
        # that fast. Commands, however, may be typed ahead, one by one.
        queue = event.app.key_processor.input_queue
        is_pasted = any(press.key != Keys.CPRResponse for press in queue)
        text = buffer.text
        is_quoted = text.startswith(QUOTES) and text.count(QUOTES) == 1
        if is_quoted or (is_pasted and not is_command(text)):
            buffer.newline(copy_margin=False)
        else:
            buffer.validate_and_handle()

    @keys.add("escape", "enter", filter=is_typing)
    def _new_line(event: KeyPressEvent) -> None:
        event.current_buffer.newline(copy_margin=False)

    @keys.add("c-c", filter=is_typing)
    def _clear(event: KeyPressEvent) -> None:
        event.current_buffer.reset()

    return keys
