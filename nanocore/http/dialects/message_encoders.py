"""Encoders of /v1/messages: a whole message, or a stream of its blocks.

Blocks are in the order in which the model wrote them. Thinking is signed with a constant, because
some clients drop unsigned thinking. The prompt's tokens are the sum of input_tokens and
cache_read_input_tokens, as Anthropic counts them.

A tool's input must be an object. If the model's arguments are not one, because it erred or was cut
off, the input is {"INVALID_JSON": the text}: the form in which Anthropic's documents have clients
return such a text to a model.
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
from nanocore.http.dialects.encoding import WholeEncoder, around, escaped, event
from nanocore.http.http_errors import HttpError, anthropic_body

_INVALID: Final = "INVALID_JSON"


def tool_input(arguments: str) -> msgspec.Raw | dict[str, Any]:
    """Return a call's arguments as an object, numbers as the model wrote them."""
    if not arguments.strip():
        return {}
    try:
        if isinstance(msgspec.json.decode(arguments), dict):
            return msgspec.Raw(arguments.strip().encode())
    except (msgspec.DecodeError, RecursionError):
        pass
    return {_INVALID: arguments}


class StreamedInput:
    """Streams a call's arguments if they begin as an object; holds other text until the end."""

    def __init__(self) -> None:
        self._held: list[str] = []
        self._is_object: bool | None = None  # None until the first character that is not a space

    def feed(self, delta: str) -> str:
        """Return the text to send now."""
        if self._is_object:
            return delta
        self._held.append(delta)
        if self._is_object is None and (begin := delta.lstrip()):
            self._is_object = begin.startswith("{")
            if self._is_object:
                return "".join(self._held)
        return ""

    def finish(self) -> str:
        """Return what is left to send: held text, as an object."""
        if self._is_object is not False:
            return ""
        return msgspec.json.encode({_INVALID: "".join(self._held)}).decode()


_PLACE: Final = "\x00delta"
"""Placeholder for the text of a delta."""
_SIGNATURE: Final = "nanocore"
_STOP_REASONS: Final = {"length": "max_tokens", "tool_calls": "tool_use"}
_PING: Final = event("ping", {"type": "ping"})
_Begin: TypeAlias = Text | Reasoning | ToolBegin
"""Events with which a block may begin."""
_DELTAS: Final[dict[type[_Begin], tuple[str, str]]] = {
    Text: ("text_delta", "text"),
    Reasoning: ("thinking_delta", "thinking"),
    ToolBegin: ("input_json_delta", "partial_json"),
}
"""Type of the deltas in their blocks, and the key of the delta's text."""


class _Message:
    """The message, its stop reason and its usage, as far as they are known."""

    def __init__(self, response_id: str, model: str) -> None:
        self._id, self._model = response_id, model
        self.started: Started | None = None
        self.finished: Finished | None = None

    def reasons(self) -> tuple[str | None, str | None]:
        if self.finished is None:
            return None, None
        if isinstance(self.finished.stop_reason, str):
            return "stop_sequence", self.finished.stop_reason
        return _STOP_REASONS.get(self.finished.finish_reason, "end_turn"), None

    def usage(self) -> dict[str, Any]:
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

    def whole(self, content: list[dict[str, Any]]) -> dict[str, Any]:
        stop_reason, stop_sequence = self.reasons()
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": content,
            "stop_reason": stop_reason,
            "stop_sequence": stop_sequence,
            "usage": self.usage(),
        }


class MessageStreamEncoder:
    """Encoder of a stream of events; see `delivery.Encoder`."""

    is_stream = True
    keep_alive = _PING

    def __init__(self, response_id: str, model: str) -> None:
        self._message = _Message(response_id, model)
        self._num_blocks = 0
        self._open: type[_Begin] | None = None  # the kind of event that began the open block
        self._around = (b"", b"")  # bytes around the text of a delta in the open block
        self._input = StreamedInput()

    def feed(self, number: int, events: Sequence[ChatEvent], num_output_tokens: int) -> bytes:
        # Fast path of nearly every token: a delta of the open block, between two fixed pieces.
        if len(events) == 1:
            only = events[0]
            if type(only) is self._open and (type(only) is Text or type(only) is Reasoning):
                before, after = self._around
                return before + escaped(only.delta) + after
        return b"".join([part for each in events for part in self._parts(each)])

    def finish(self) -> bytes:
        stop_reason, stop_sequence = self._message.reasons()
        delta = {"stop_reason": stop_reason, "stop_sequence": stop_sequence}
        last = {"type": "message_delta", "delta": delta, "usage": self._message.usage()}
        parts = [
            *self._close(),
            event("message_delta", last),
            event("message_stop", {"type": "message_stop"}),
        ]
        return b"".join(parts)

    def fail(self, error: HttpError) -> bytes:
        return b"event: error\ndata: " + anthropic_body(error) + b"\n\n"

    def _parts(self, each: ChatEvent) -> list[bytes]:
        match each:
            case Started():
                self._message.started = each
                start = {"type": "message_start", "message": self._message.whole([])}
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
                self._message.finished = each
                return []
            case _:
                raise AssertionError(f"{each} is not a message's")

    def _delta(self, text: str) -> bytes:
        before, after = self._around
        return before + escaped(text) + after

    def _begin(self, first: _Begin) -> list[bytes]:
        """Close the open block, and open one that begins with this event."""
        closed = self._close()
        self._open = type(first)
        self._input = StreamedInput()
        kind, key = _DELTAS[self._open]
        delta = self._block_event("content_block_delta", delta={"type": kind, key: _PLACE})
        self._around = around(delta, _PLACE, "content_block_delta")
        start = self._block_event("content_block_start", content_block=_block(first, ""))
        return [*closed, event("content_block_start", start)]

    def _close(self) -> list[bytes]:
        if self._open is None:
            return []
        parts = []
        if self._open is ToolBegin and (rest := self._input.finish()):
            parts.append(self._delta(rest))
        if self._open is Reasoning:
            delta = {"type": "signature_delta", "signature": _SIGNATURE}
            signed = self._block_event("content_block_delta", delta=delta)
            parts.append(event("content_block_delta", signed))
        parts.append(event("content_block_stop", self._block_event("content_block_stop")))
        self._open = None
        self._num_blocks += 1
        return parts

    def _block_event(self, kind: str, **fields: Any) -> dict[str, Any]:
        return {"type": kind, "index": self._num_blocks, **fields}


class MessageEncoder(WholeEncoder):
    """Encoder of a whole message; see `delivery.Encoder`."""

    def __init__(self, response_id: str, model: str) -> None:
        self._message = _Message(response_id, model)
        self._blocks: list[tuple[_Begin, list[str]]] = []

    def feed(self, number: int, events: Sequence[ChatEvent], num_output_tokens: int) -> bytes:
        for each in events:
            match each:
                case Started():
                    self._message.started = each
                case Finished():
                    self._message.finished = each
                case ToolBegin():
                    self._blocks.append((each, []))
                case Text() | Reasoning():
                    if not self._blocks or type(self._blocks[-1][0]) is not type(each):
                        self._blocks.append((each, []))
                    self._blocks[-1][1].append(each.delta)
                case ToolArguments():
                    self._blocks[-1][1].append(each.delta)
                case _:
                    raise AssertionError(f"{each} is not a message's")
        return b""

    def finish(self) -> bytes:
        content = [_block(begin, "".join(deltas), _SIGNATURE) for begin, deltas in self._blocks]
        return msgspec.json.encode(self._message.whole(content))


def _block(begin: _Begin, whole: str, signature: str = "") -> dict[str, Any]:
    if isinstance(begin, ToolBegin):
        call = {"type": "tool_use", "id": begin.id, "name": begin.name}
        return {**call, "input": tool_input(whole)}
    if isinstance(begin, Reasoning):
        return {"type": "thinking", "thinking": whole, "signature": signature}
    return {"type": "text", "text": whole}
