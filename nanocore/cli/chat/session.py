"""One run of `nanocore chat`: its target from beginning to end, and one question to it.

With a terminal on both sides it is a conversation (`interactive`). What the client logs of an
engine that dies becomes a note; the engine's own log is a file.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Final

from nanocore.cli.chat.conversation import Conversation
from nanocore.cli.chat.engine_target import EngineTarget
from nanocore.cli.chat.files import open_engine_log
from nanocore.cli.chat.flags import ChatOptions
from nanocore.cli.chat.once import answer_once
from nanocore.cli.chat.target import ChatTarget
from nanocore.cli.chat.terminal import Interrupts
from nanocore.protocol.errors import ConfigError
from nanocore.system import standard_streams

if TYPE_CHECKING:
    from nanocore.cli.chat.openai_target import OpenAITarget
    from nanocore.cli.chat.view import View

_MAX_QUESTION_BYTES: Final = 2**24


def ask(options: ChatOptions) -> int:
    """One question; the exit code.

    Raises:
        NanocoreError: nobody can be asked, or it has no answer.
    """
    question = options.quick if options.quick is not None else _read_question()
    with logged_to(standard_streams.complain):
        return asyncio.run(Interrupts().run(_answer(options, question)))


async def _answer(options: ChatOptions, question: str) -> None:
    conversation = Conversation(options.system)
    conversation.say(question)
    async with opened(options, None) as target:
        await answer_once(target, conversation, options.sampling)


@asynccontextmanager
async def opened(options: ChatOptions, view: View | None) -> AsyncIterator[ChatTarget]:
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


def logged_to(tell: Callable[[str], None]) -> AbstractContextManager[None]:
    return handled_by(_Notes(tell))


@contextmanager
def handled_by(handler: logging.Handler) -> Iterator[None]:
    root = logging.getLogger()
    root.addHandler(handler)
    try:
        yield
    finally:
        root.removeHandler(handler)
