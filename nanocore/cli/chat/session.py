"""One run of `nanocore chat`: opens the target, and asks one question without a terminal.

At a terminal `interactive` takes over. Warnings of the client, such as those of an engine that
crashed, become notes; the engine's own log goes to a file.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import select
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import ExitStack, aclosing, asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from nanocore.cli.chat.commands import with_defaults
from nanocore.cli.chat.conversation import Conversation
from nanocore.cli.chat.engine_target import EngineChatTarget
from nanocore.cli.chat.files import open_engine_log
from nanocore.cli.chat.target import ChatTurn, incompleteness
from nanocore.cli.interrupts import Interrupts
from nanocore.client.chat.events import Text
from nanocore.protocol.errors import ConfigError, InvalidRequestError, NanocoreError
from nanocore.system import standard_streams
from nanocore.system.standard_streams import harmless

if TYPE_CHECKING:
    from nanocore.cli.chat.flags import ChatSettings
    from nanocore.cli.chat.openai_target import OpenAIChatTarget
    from nanocore.cli.chat.view import View

    ChatTarget: TypeAlias = EngineChatTarget | OpenAIChatTarget

_MAX_QUESTION_BYTES: Final = 2**24
_INPUT_PATIENCE_S: Final = 2.0


def ask(options: ChatSettings) -> int:
    """Ask one question; return the exit code.

    Raises:
        NanocoreError: no target, or no complete response.
    """
    question = _read_question() if options.quick is None else with_input(options.quick)
    with handled_by(WarningNotes(standard_streams.complain)):
        return asyncio.run(Interrupts().run(_ask(options, question)))


async def _ask(options: ChatSettings, question: str) -> None:
    conversation = Conversation(options.system)
    conversation.say(question)
    async with opened(options, None) as target:
        await ask_once(target, conversation, options.sampling)


async def ask_once(
    target: ChatTarget, conversation: Conversation, sampling: Mapping[str, Any]
) -> None:
    """Stream the response to standard output; a terminal gets no control characters.

    Raises:
        ConfigError: the question is invalid.
        NanocoreError: no response, or an incomplete one.
    """
    turn = ChatTurn()
    try:
        params = with_defaults(sampling, target.default_sampling)
        events = target.ask(conversation.messages, params)
        async with aclosing(events):
            async for event in events:
                turn.add(event)
                if isinstance(event, Text):
                    _write(harmless(event.delta) if sys.stdout.isatty() else event.delta)
    except InvalidRequestError as error:
        raise ConfigError(str(error)) from None
    finally:
        if turn.answer.content:
            _write("\n")
    answer = turn.answer
    for call in answer.tool_calls:
        standard_streams.complain(f"the model calls {call.name} {call.arguments}")
    if why := incompleteness(answer, turn.stats(), target.max_model_len):
        why = why.partition(";")[0]
        if answer.finish_reason not in ("length", "stop"):
            raise NanocoreError(why)
        standard_streams.complain(why)


def _write(text: str) -> None:
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        raise NanocoreError(f"standard output cannot be written: {error.strerror}") from None


@asynccontextmanager
async def opened(options: ChatSettings, view: View | None) -> AsyncIterator[ChatTarget]:
    """Open the target inside this block. view: shows notes."""
    with ExitStack() as closing_last:
        target: ChatTarget
        if options.url is not None:
            from nanocore.cli.chat.openai_target import OpenAIChatTarget

            target = OpenAIChatTarget(options.url, options.api_key, options.model_name)
        elif options.engine.endpoints:
            target = EngineChatTarget(options.engine, None, options.chat_template)
        else:
            tell = standard_streams.complain if view is None else view.note
            log = open_engine_log(tell)
            closing_last.callback(log.close)
            name = options.engine.model or "the demo model"
            tell(f"starting an engine for {name}: a few seconds to a minute")
            target = EngineChatTarget(options.engine, log, options.chat_template)
        try:
            await target.open()
            yield target
        finally:
            await target.close()


def _read_question() -> str:
    text = _read_input()
    if not text.strip():
        raise ConfigError("standard input is empty: write a question to it, or use -q MESSAGE")
    return text


def with_input(question: str) -> str:
    """Return the question, and after a blank line what is piped into standard input, if anything.

    Raises:
        ConfigError: the input is not UTF-8, or too long.
    """
    if sys.stdin.isatty():
        return question
    if not select.select([sys.stdin], [], [], _INPUT_PATIENCE_S)[0]:
        standard_streams.complain("waiting for standard input; </dev/null leaves it out")
    text = _read_input(is_optional=True)
    return f"{question}\n\n{text}" if text.strip() else question


def _read_input(is_optional: bool = False) -> str:
    """is_optional: an input that is not open for reading, as nohup leaves it, is empty."""
    try:
        data = sys.stdin.buffer.read(_MAX_QUESTION_BYTES + 1)
        text = data.decode()
    except UnicodeDecodeError as error:
        raise ConfigError(f"standard input is not UTF-8: {error}") from None
    except OSError as error:
        if is_optional and error.errno == errno.EBADF:
            return ""
        raise ConfigError(f"standard input cannot be read: {error.strerror}") from None
    if len(data) > _MAX_QUESTION_BYTES:
        raise ConfigError(f"standard input has more than {_MAX_QUESTION_BYTES // 2**20} MiB")
    return text.removesuffix("\n")


class WarningNotes(logging.Handler):
    """Shows warnings, and tracebacks of bugs. The client logs in the event loop's thread."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        super().__init__(logging.WARNING)
        self._tell = tell

    def emit(self, record: logging.LogRecord) -> None:
        self._tell(self.format(record))


@contextmanager
def handled_by(handler: logging.Handler) -> Iterator[None]:
    """Send all log records to this handler, too, inside this block."""
    logging.getLogger().addHandler(handler)
    try:
        yield
    finally:
        logging.getLogger().removeHandler(handler)
