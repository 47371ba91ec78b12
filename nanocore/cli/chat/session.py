"""One run of `nanocore chat`: its target from beginning to end, and what is done with it.

With a terminal on both sides it is a conversation, else one question. What the client logs of an
engine that dies becomes a note; the engine's own log is a file.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import (
    AbstractContextManager,
    ExitStack,
    asynccontextmanager,
    contextmanager,
    nullcontext,
)
from functools import partial
from typing import TYPE_CHECKING, Final

from prompt_toolkit.history import History, InMemoryHistory
from rich.console import Console

from nanocore.cli.chat.conversation import Conversation
from nanocore.cli.chat.engine_target import EngineTarget
from nanocore.cli.chat.files import ErrorLog, InputHistory, open_engine_log, state_directory
from nanocore.cli.chat.flags import ChatOptions
from nanocore.cli.chat.loop import ChatLoop
from nanocore.cli.chat.once import answer_once
from nanocore.cli.chat.prompt import Prompt
from nanocore.cli.chat.target import ChatTarget
from nanocore.cli.chat.terminal import Interrupts, LinePrompt, is_dumb, quiet_keyboard
from nanocore.cli.chat.view import View
from nanocore.protocol.errors import ConfigError
from nanocore.system import standard_streams

if TYPE_CHECKING:
    from nanocore.cli.chat.openai_target import OpenAITarget

_MAX_QUESTION_BYTES: Final = 2**24


def chat(options: ChatOptions) -> int:
    """All of it; the exit code.

    Raises:
        NanocoreError: nobody can be asked, or the one question has no answer.
    """
    interrupts = Interrupts()
    if options.quick is None and sys.stdin.isatty() and sys.stdout.isatty():
        return asyncio.run(interrupts.run(_converse(options, interrupts)))
    question = options.quick if options.quick is not None else _read_question()
    with _logged_to(standard_streams.complain):
        return asyncio.run(interrupts.run(_answer(options, question)))


async def _answer(options: ChatOptions, question: str) -> None:
    conversation = Conversation(options.system)
    conversation.say(question)
    async with _opened(options, None) as target:
        await answer_once(target, conversation, options.sampling)


async def _converse(options: ChatOptions, interrupts: Interrupts) -> None:
    """From the first line to the last."""
    view, keyboard = View(Console(), options.is_plain), sys.stdin.fileno()
    prompt: LinePrompt | Prompt
    if is_dumb(dict(os.environ)):
        async with _opened(options, view) as target:
            quiet = partial(quiet_keyboard, keyboard, in_lines=True)
            loop = _loop(options, target, view, interrupts, quiet)
            prompt = LinePrompt(keyboard, _write, interrupts)
            await _run(loop, prompt, view, tells_figures=True)
        return
    # All the time: a terminal that changes its manner between two keys may lose one.
    with quiet_keyboard(keyboard, in_lines=False):
        async with _opened(options, view) as target:
            loop = _loop(options, target, view, interrupts, nullcontext)
            prompt = Prompt(_history(view), loop.status, lambda: loop.models, interrupts)
            await _run(loop, prompt, view, tells_figures=False)


def _loop(
    options: ChatOptions,
    target: ChatTarget,
    view: View,
    interrupts: Interrupts,
    quiet: Callable[[], AbstractContextManager[None]],
) -> ChatLoop:
    conversation = Conversation(options.system)
    return ChatLoop(target, conversation, dict(options.sampling), view, interrupts, quiet)


async def _run(
    loop: ChatLoop, prompt: LinePrompt | Prompt, view: View, tells_figures: bool
) -> None:
    view.note(f"{loop.status(sys.maxsize)}; /help lists commands, Ctrl-D ends")
    with _handled_by(ErrorLog()), _logged_to(lambda text: prompt.above(partial(view.note, text))):
        await loop.run(prompt, tells_figures)


@asynccontextmanager
async def _opened(options: ChatOptions, view: View | None) -> AsyncIterator[ChatTarget]:
    """view: of who waits for it, if somebody does."""
    with ExitStack() as closing_last:
        target: EngineTarget | OpenAITarget
        if options.url is not None:
            from nanocore.cli.chat.openai_target import OpenAITarget

            target = OpenAITarget(options.url, options.api_key, options.model_name)
        elif options.engine.endpoints:
            target = EngineTarget(options.engine, None)
        else:
            log = open_engine_log(standard_streams.complain if view is None else view.note)
            closing_last.callback(log.close)
            target = EngineTarget(options.engine, log)
        try:
            if view is None:
                await target.open()
            else:
                async with view.waiting(target.news):
                    await target.open()
            yield target
        finally:
            await target.close()


def _history(view: View) -> History:
    """Of what was typed, also at other times."""
    try:
        return InputHistory(state_directory() / "chat-history", view.note)
    except ConfigError as error:
        view.note(f"{error}: what is typed is not kept")
        return InMemoryHistory()


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _read_question() -> str:
    """All of standard input.

    Raises:
        ConfigError: it is no question.
    """
    try:
        data = sys.stdin.buffer.read(_MAX_QUESTION_BYTES + 1)
        text = data.decode()
    except UnicodeDecodeError as error:
        raise ConfigError(f"standard input is no text in UTF-8: {error}") from None
    except OSError as error:
        raise ConfigError(f"standard input cannot be read: {error.strerror}") from None
    if len(data) > _MAX_QUESTION_BYTES:
        raise ConfigError(f"standard input has more than {_MAX_QUESTION_BYTES // 2**20} MiB")
    if not text.strip():
        raise ConfigError("standard input is empty: write a question to it, or use -q MESSAGE")
    return text.removesuffix("\n")


class _Notes(logging.Handler):
    """Warnings as lines."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        super().__init__(logging.WARNING)
        self._tell = tell

    def emit(self, record: logging.LogRecord) -> None:
        """In whatever thread it comes: those of the client come in the event loop's."""
        self._tell(record.getMessage())


def _logged_to(tell: Callable[[str], None]) -> AbstractContextManager[None]:
    return _handled_by(_Notes(tell))


@contextmanager
def _handled_by(handler: logging.Handler) -> Iterator[None]:
    root = logging.getLogger()
    root.addHandler(handler)
    try:
        yield
    finally:
        root.removeHandler(handler)
