"""Events to what /v1/messages answers: one message, or a stream of its blocks.

A message has blocks in the order in which the model wrote them. Thinking is signed with a constant:
some clients drop what nobody has signed, and shall not. The prompt's tokens are input_tokens and
cache_read_input_tokens together, as Anthropic counts them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, TypeAlias

import msgspec

from nanocore.client.chat.events import (
    ChatEvent,
    Finished,
    Reasoning,
    Started,
    Text,
    ToolArguments,
    ToolBegin,
)
from nanocore.http.dialects.encoders import WholeEncoder
from nanocore.http.dialects.sse import around, escaped, event
from nanocore.http.dialects.tool_input import StreamedInput, tool_input
from nanocore.http.errors import HttpError, anthropic_body

_PLACE: Final = "\x00delta"
"""No text of an event but the place of one."""
_SIGNATURE: Final = "nanocore"
_STOP_REASONS: Final = {"length": "max_tokens", "tool_calls": "tool_use"}
_PING: Final = event("ping", {"type": "ping"})
_Begin: TypeAlias = Text | Reasoning | ToolBegin
"""Events that a block may begin with."""
_DELTAS: Final[dict[type[_Begin], tuple[str, str]]] = {
    Text: ("text_delta", "text"),
    Reasoning: ("thinking_delta", "thinking"),
    ToolBegin: ("input_json_delta", "partial_json"),
}
"""What the deltas of their blocks are called, and the key of what they bring."""


class _End:
    """How a message ends, and what it took; before it has ended, what is known."""

    def __init__(self) -> None:
        self.started: Started | None = None
        self.finished: Finished | None = None

    def reasons(self) -> tuple[str | None, str | None]:
        """stop_reason and stop_sequence."""
        if self.finished is None:
            return None, None
        if isinstance(self.finished.stop_reason, str):
            return "stop_sequence", self.finished.stop_reason
        return _STOP_REASONS.get(self.finished.finish_reason, "end_turn"), None

    def usage(self) -> dict[str, Any]:
        """Of tokens."""
        num_prompt = len(self.started.prompt_token_ids) if self.started else 0
        num_cached = self.started.num_cached_tokens if self.started else 0
        usage: dict[str, Any] = {
            "input_tokens": num_prompt - num_cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": num_cached,
            "output_tokens": 0,
        }
        if self.finished is not None:
            used = self.finished.usage
            usage["output_tokens"] = used.num_output_tokens
            usage["output_tokens_details"] = {"thinking_tokens": used.num_reasoning_tokens}
        return usage


class MessageStyle(msgspec.Struct, frozen=True):
    """What an answer says beside its events."""

    id: str
    model: str

    def message(self, content: list[dict[str, Any]], end: _End) -> dict[str, Any]:
        """The message with these blocks, as far as it goes."""
        stop_reason, stop_sequence = end.reasons()
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": content,
            "stop_reason": stop_reason,
            "stop_sequence": stop_sequence,
            "usage": end.usage(),
        }


class MessageStreamEncoder:
    """Implements `delivery.Encoder`."""

    is_stream = True
    keep_alive = _PING

    def __init__(self, style: MessageStyle) -> None:
        self._style = style
        self._end = _End()
        self._num_blocks = 0
        self._open: type[_Begin] | None = None  # which event the open block began with
        self._around = (b"", b"")  # of a delta of the open block
        self._input = StreamedInput()

    def feed(self, number: int, events: Sequence[ChatEvent], num_output_tokens: int) -> bytes:
        """The events of these events."""
        if len(events) == 1:
            only = events[0]
            if type(only) is self._open and (type(only) is Text or type(only) is Reasoning):
                before, after = self._around
                return before + escaped(only.delta) + after
            if type(only) is ToolArguments:
                shown = self._input.feed(only.delta)
                return self._delta(shown) if shown else b""
        return b"".join([part for each in events for part in self._parts(each)])

    def finish(self) -> bytes:
        """The end of the last block, and of the message."""
        stop_reason, stop_sequence = self._end.reasons()
        delta = {"stop_reason": stop_reason, "stop_sequence": stop_sequence}
        last = {"type": "message_delta", "delta": delta, "usage": self._end.usage()}
        parts = [
            *self._close(),
            event("message_delta", last),
            event("message_stop", {"type": "message_stop"}),
        ]
        return b"".join(parts)

    def fail(self, error: HttpError) -> bytes:
        """An error instead of the rest."""
        return b"event: error\ndata: " + anthropic_body(error) + b"\n\n"

    # -- inside -----------------------------------------------------------------------------------

    def _parts(self, each: ChatEvent) -> list[bytes]:
        match each:
            case Started():
                self._end.started = each
                message = self._style.message([], self._end)
                start = {"type": "message_start", "message": message}
                return [event("message_start", start), _PING]
            case Text() | Reasoning():
                begun = [] if self._open is type(each) else self._begin(each)
                return [*begun, self._delta(each.delta)]
            case ToolBegin():
                return self._begin(each)
            case ToolArguments():
                shown = self._input.feed(each.delta)
                return [self._delta(shown)] if shown else []
            case Finished():
                self._end.finished = each
                return []
            case _:
                raise AssertionError(f"{each} is none of a message's")

    def _delta(self, text: str) -> bytes:
        before, after = self._around
        return before + escaped(text) + after

    def _begin(self, first: _Begin) -> list[bytes]:
        """Close the block before, and open the one of this event."""
        closed = self._close()
        self._open = type(first)
        self._input = StreamedInput()
        kind, key = _DELTAS[self._open]
        delta = self._of_block("content_block_delta", delta={"type": kind, key: _PLACE})
        self._around = around(delta, _PLACE, "content_block_delta")
        start = self._of_block("content_block_start", content_block=_block(first, ""))
        return [*closed, event("content_block_start", start)]

    def _close(self) -> list[bytes]:
        """End the open block, if one is."""
        if self._open is None:
            return []
        parts = []
        if self._open is ToolBegin and (rest := self._input.finish()):
            parts.append(self._delta(rest))
        if self._open is Reasoning:
            delta = {"type": "signature_delta", "signature": _SIGNATURE}
            signed = self._of_block("content_block_delta", delta=delta)
            parts.append(event("content_block_delta", signed))
        parts.append(event("content_block_stop", self._of_block("content_block_stop")))
        self._open = None
        self._num_blocks += 1
        return parts

    def _of_block(self, kind: str, **fields: Any) -> dict[str, Any]:
        """An event of the block that is, or will be, open."""
        return {"type": kind, "index": self._num_blocks, **fields}


class MessageAnswerEncoder(WholeEncoder):
    """Implements `delivery.Encoder`: the whole message at its end."""

    def __init__(self, style: MessageStyle) -> None:
        self._style = style
        self._end = _End()
        self._blocks: list[tuple[_Begin, list[str]]] = []

    def feed(self, number: int, events: Sequence[ChatEvent], num_output_tokens: int) -> bytes:
        """Keep them."""
        for each in events:
            match each:
                case Started():
                    self._end.started = each
                case Finished():
                    self._end.finished = each
                case ToolBegin():
                    self._blocks.append((each, []))
                case Text() | Reasoning():
                    if not self._blocks or type(self._blocks[-1][0]) is not type(each):
                        self._blocks.append((each, []))
                    self._blocks[-1][1].append(each.delta)
                case ToolArguments():
                    self._blocks[-1][1].append(each.delta)
                case _:
                    raise AssertionError(f"{each} is none of a message's")
        return b""

    def finish(self) -> bytes:
        """The message."""
        content = [_block(begin, "".join(deltas), _SIGNATURE) for begin, deltas in self._blocks]
        return msgspec.json.encode(self._style.message(content, self._end))


def _block(begin: _Begin, whole: str, signature: str = "") -> dict[str, Any]:
    """The block that begins with this event, and has all this text."""
    if isinstance(begin, ToolBegin):
        call = {"type": "tool_use", "id": begin.id, "name": begin.name}
        return {**call, "input": tool_input(whole)}
    if isinstance(begin, Reasoning):
        return {"type": "thinking", "thinking": whole, "signature": signature}
    return {"type": "text", "text": whole}
