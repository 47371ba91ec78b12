"""Prompt: where the user types, with history, completion and a line of what is known below.

Enter sends; Alt-Enter, and Enter within what is pasted, begin a line. Ctrl-C empties the prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from prompt_toolkit import PromptSession
from prompt_toolkit.application import run_in_terminal
from prompt_toolkit.completion import CompleteEvent, Completer, Completion, PathCompleter
from prompt_toolkit.document import Document
from prompt_toolkit.enums import DEFAULT_BUFFER
from prompt_toolkit.filters import Condition, has_focus
from prompt_toolkit.history import History
from prompt_toolkit.input import Input
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.keys import Keys
from prompt_toolkit.output import Output

from nanocore.cli.chat.commands import COMMANDS, is_command
from nanocore.cli.chat.sampling import NAMES
from nanocore.cli.chat.terminal import Interrupts

PROMPT = "> "


class Prompt:
    """Args:
    status: the line below, for a terminal of so many columns. models: what `/model` may be given.
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
            complete_while_typing=Condition(self._is_command),
            prompt_continuation=lambda width, line, soft: " " * width,
            key_bindings=_keys(),
            bottom_toolbar=lambda: status(self._session.output.get_size().columns),
            enable_history_search=False,
            input=input,
            output=output,
        )

    async def read(self) -> str:
        """What the user sends.

        Raises:
            EOFError: nothing more.
        """
        with self._interrupts.to(self._session.default_buffer.reset):
            text = await self._session.prompt_async(handle_sigint=False)
        # Bytes that the locale's encoding does not know are UTF-8 all the same.
        return text.encode(errors="surrogateescape").decode(errors="replace")

    def above(self, write: Callable[[], None]) -> None:
        """Write something; while a prompt is shown, above it."""
        if self._session.app.is_running:
            run_in_terminal(write)  # the application waits for it before it ends
        else:
            write()

    def _is_command(self) -> bool:
        return is_command(self._session.default_buffer.text)


class CommandCompleter(Completer):
    """Of commands and what they take; nothing in messages."""

    def __init__(self, models: Callable[[], Iterable[str]]) -> None:
        self._models = models
        self._paths = PathCompleter(expanduser=True)

    def get_completions(
        self, document: Document, complete_event: CompleteEvent
    ) -> Iterable[Completion]:
        """See `Completer`."""
        text = document.text_before_cursor
        if not text.startswith("/") or "\n" in text:
            return
        name, blank, argument = text[1:].partition(" ")
        if not blank:
            for known, command in COMMANDS.items():
                if known.startswith(name):
                    yield Completion(
                        known, -len(name), display=f"/{known}", display_meta=command.meaning
                    )
        elif name in ("save", "load") or (name == "model" and argument[:1] in ("/", ".", "~")):
            yield from self._paths.get_completions(Document(argument), complete_event)
        else:
            values = {"set": NAMES, "model": self._models()}.get(name, ())
            for value in values:
                if value.startswith(argument):
                    yield Completion(value, -len(argument))


def _keys() -> KeyBindings:
    keys = KeyBindings()
    is_typing = has_focus(DEFAULT_BUFFER)  # and does not search

    @keys.add("enter", filter=is_typing)
    def _enter(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        # Pasted into a terminal that does not say so; but commands are typed ahead, one by one.
        if _has_more(event) and not is_command(buffer.text):
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


def _has_more(event: KeyPressEvent) -> bool:
    """Whether other keys have come with this one: nobody types so fast."""
    queue = event.app.key_processor.input_queue
    return any(press.key != Keys.CPRResponse for press in queue)
