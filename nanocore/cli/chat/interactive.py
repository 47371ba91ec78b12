"""The conversation at a terminal: its loop, and the prompt with history, completion and keys.

Enter sends; Alt-Enter, and Enter within pasted or quoted text, start a new line. Ctrl-C empties the
prompt.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import termios
from collections.abc import Callable, Iterable, Iterator
from contextlib import aclosing, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from prompt_toolkit import PromptSession
from prompt_toolkit.application import run_in_terminal
from prompt_toolkit.completion import CompleteEvent, Completer, Completion
from prompt_toolkit.document import Document
from prompt_toolkit.enums import DEFAULT_BUFFER
from prompt_toolkit.filters import Condition, has_focus
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.input import Input
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.keys import Keys
from prompt_toolkit.output import Output
from rich.console import Console

from nanocore.cli.chat.commands import (
    ALIASES,
    COMMANDS,
    SAMPLING_NAMES,
    SlashCommand,
    help_text,
    is_command,
    parse_command,
    parse_setting,
    sampling_in_force,
    sampling_line,
    with_defaults,
    with_value,
)
from nanocore.cli.chat.conversation import Conversation
from nanocore.cli.chat.files import state_directory
from nanocore.cli.chat.flags import ChatSettings
from nanocore.cli.chat.session import WarningNotes, handled_by, opened
from nanocore.cli.chat.target import ChatTurn, TurnStats, incompleteness, status_line
from nanocore.cli.chat.view import View
from nanocore.cli.interrupts import Interrupts
from nanocore.protocol.errors import (
    ConfigError,
    ContextLengthError,
    NanocoreError,
    shorten,
)
from nanocore.system.private_directory import open_regular, replace_file

if TYPE_CHECKING:
    from nanocore.cli.chat.session import ChatTarget

logger = logging.getLogger(__name__)
_LOST_POLL_S: Final = 1.0
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
    view = View(Console())
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
            with handled_by(notes):
                await loop.run(prompt)


class ChatLoop:
    """Reads the user's input, streams responses and runs commands, until the end.

    Every error becomes one line and the loop continues; `/retry` asks again. Internal errors are
    only shown, with their traceback, so that no conversation is lost to a bug. sampling: at the
    beginning.
    """

    def __init__(
        self,
        target: ChatTarget,
        conversation: Conversation,
        sampling: dict[str, Any],
        view: View,
        interrupts: Interrupts,
    ) -> None:
        self._target = target
        self._conversation = conversation
        self._sampling = sampling
        self._view = view
        self._interrupts = interrupts
        self._stats = TurnStats()
        self.models: list[str] = []

    async def run(self, prompt: Prompt) -> None:
        """Run until the end of the input, or `/exit`."""
        with self._interrupts.to(lambda: None):  # Ctrl-C between a question and its response
            try:
                await self._interrupts.stoppable(self._find_models())
            except NanocoreError:
                pass  # the list is only for completion, and servers may have none
            except Exception as error:
                self._report(error)
            while True:
                try:
                    text = await prompt.read()
                except EOFError:
                    return
                try:
                    if not await self._handle(text):
                        return
                except NanocoreError as error:
                    self._view.error(str(error))
                except Exception as error:
                    self._report(error)

    async def _handle(self, text: str) -> bool:
        """Handle an input; return whether to continue."""
        if not text.strip():
            return True
        command = parse_command(text)
        if command is not None:
            await self._execute(command)
            return command.name != "exit"
        self._conversation.say(text.strip("\n"))
        await self._ask()
        return True

    def _report(self, error: Exception) -> None:
        self._view.end_answer()
        what = f"{type(error).__name__}: {shorten(' '.join(str(error).split()))}"
        logger.error("internal error, the chat continues: %s", what, exc_info=error)

    def status(self, num_columns: int) -> str:
        target = self._target
        return status_line(target.model, self._stats, target.max_model_len, num_columns)

    def sampling_in_force(self) -> str:
        return sampling_in_force(self._sampling, self._target.default_sampling)

    async def _ask(self) -> None:
        turn = ChatTurn()
        self._view.begin_answer()
        try:
            has_ended = await self._interrupts.stoppable(self._stream(turn))
        except ContextLengthError:
            length = self._target.max_model_len
            tokens = "" if length is None else f" of {length:,} tokens"
            self._view.error(
                f"the conversation is longer than the context{tokens}: /undo takes back the last "
                "turn, /new starts afresh"
            )
            return
        except NanocoreError as error:
            self._view.error(f"{error}; /retry asks again")
            return
        finally:  # text that has arrived stays in the conversation
            self._stats = turn.stats()
            message = turn.message()
            if message is not None:
                self._conversation.answer(message)
        self._view.end_answer()
        if not has_ended:
            self._view.note("stopped")
        elif why := incompleteness(turn.answer, self._stats, self._target.max_model_len):
            self._view.note(why)

    async def _stream(self, turn: ChatTurn) -> None:
        watch = asyncio.create_task(self._watch_connection())
        try:
            params = with_defaults(self._sampling, self._target.default_sampling)
            events = self._target.ask(self._conversation.messages, params)
            async with aclosing(events):
                async for event in events:
                    turn.add(event)
                    self._view.show(event)
        finally:
            watch.cancel()

    async def _watch_connection(self) -> None:
        await asyncio.sleep(_LOST_POLL_S)
        while self._target.is_connected:
            await asyncio.sleep(_LOST_POLL_S)
        self._view.note("no engine is running; waiting for one, Ctrl-C stops")

    async def _execute(self, command: SlashCommand) -> None:
        argument, conversation, view = command.argument, self._conversation, self._view
        match command.name:
            case "help":
                view.say(help_text())
            case "system" if argument:
                conversation.system = "" if argument == "-" else argument
            case "system":
                view.say(conversation.system or "(no system prompt)")
            case "model" if argument:
                if await self._interrupts.stoppable(self._target.switch(argument)):
                    self._stats = TurnStats()
                    view.note(f"model: {self._target.model}")
            case "model":
                if await self._interrupts.stoppable(self._find_models()):
                    current = self._target.model
                    others = [f"  {model}" for model in self.models if model != current]
                    view.say("\n".join([f"* {current}", *others]))
            case "new":
                conversation.clear()
                self._stats = TurnStats()
            case "retry":
                conversation.pending = conversation.take_back()
                await self._ask()
            case "undo":
                view.note(f"removed: {conversation.take_back().get('content')}")
                self._stats = TurnStats()
            case "show":
                facts = {"model": self._target.model, **self._target.facts()}
                lines = [f"{name}: {value}" for name, value in facts.items()]
                view.say("\n".join([*lines, self.sampling_in_force()]))
            case "set" if argument.startswith("system "):
                conversation.system = argument.removeprefix("system ").strip()
            case "set" if argument:
                self._sampling = with_value(self._sampling, *parse_setting(argument))
                view.say(sampling_line(self._sampling) or self.sampling_in_force())
            case "set":
                view.say(self.sampling_in_force())

    async def _find_models(self) -> None:
        self.models = await self._target.models()


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
