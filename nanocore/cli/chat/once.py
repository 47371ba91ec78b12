"""One question, and its answer alone on standard output: for pipes and programs."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import aclosing
from typing import Any

from nanocore.cli.chat.conversation import Conversation
from nanocore.cli.chat.target import ChatTarget
from nanocore.cli.chat.turn import Turn, ending
from nanocore.client.chat.events import Text
from nanocore.protocol.errors import ConfigError, InvalidRequestError, NanocoreError
from nanocore.system import standard_streams
from nanocore.system.standard_streams import harmless


async def answer_once(
    target: ChatTarget, conversation: Conversation, sampling: Mapping[str, Any]
) -> None:
    """Print what it is answered, as it comes: to a terminal without its control characters.

    Raises:
        ConfigError: the question cannot be answered as it is.
        NanocoreError: it was not, or not to the end.
    """
    turn = Turn()
    is_terminal = sys.stdout.isatty()
    try:
        events = target.ask(conversation.messages, sampling)
        async with aclosing(events):
            async for event in events:
                turn.add(event)
                if isinstance(event, Text):
                    _write(harmless(event.delta) if is_terminal else event.delta)
    except InvalidRequestError as error:
        raise ConfigError(str(error)) from None
    finally:
        if turn.answer.content:
            _write("\n")
    answer = turn.answer
    for call in answer.tool_calls:
        standard_streams.complain(f"the model calls {call.name} {call.arguments}")
    if why := ending(answer, turn.figures(), target.max_model_len):
        why = why.partition(";")[0]
        if answer.finish_reason not in ("length", "stop"):
            raise NanocoreError(why)
        standard_streams.complain(f"nanocore chat: {why}")


def _write(text: str) -> None:
    """Raises NanocoreError if it cannot be; BrokenPipeError if nobody reads it."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        raise NanocoreError(f"standard output cannot be written: {error.strerror}") from None
