"""Events to what /v1/responses answers: one object, or a stream of named events.

A delta is a prefix, its sequence number, and a text between two more pieces that stay the same for
as long as an item is open.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, TypeAlias

import msgspec

from nanocore.client.chat.events import (
    ChatEvent,
    Finished,
    Logprobs,
    Reasoning,
    Started,
    Text,
    ToolArguments,
    ToolBegin,
)
from nanocore.http.dialects.encoders import WholeEncoder
from nanocore.http.dialects.logprobs import chat_logprobs
from nanocore.http.dialects.response_items import Item
from nanocore.http.dialects.response_object import ResponseState, ResponseStyle, response_error
from nanocore.http.dialects.response_output import (
    CallItem,
    MessageItem,
    OpenItem,
    Output,
    ReasoningItem,
    StreamEvent,
)
from nanocore.http.dialects.sse import COMMENT, around, escaped
from nanocore.http.dialects.sse import event as named_event
from nanocore.http.errors import HttpError

Keep: TypeAlias = Callable[[bytes, list[Item]], None]
"""Called with the response as JSON, and its output, before anybody is told that it has ended."""
_NUMBER: Final = "\x00number"
_DELTA: Final = "\x00delta"
_DELTAS: Final = (Text, Reasoning, ToolArguments)
_ITEMS: Final = {Text: MessageItem, Reasoning: ReasoningItem, ToolArguments: CallItem}
"""Those that are written piece by piece; a custom call is not."""


class _ResponseEncoder:
    """What both have: the response, its items, and the log probabilities of its text.

    Log probabilities come after the text that they belong to, or before it, while the text is held
    back. Those of reasoning are not shown, and in a stream not those of calls; a whole answer has
    them in one piece, and its first text gets all that came after the reasoning.
    """

    def __init__(self, style: ResponseStyle, keep: Keep | None) -> None:
        self._style = style
        self._keep = keep
        self._state = ResponseState(style)
        self._output = Output(style.key, style.custom_tools, style.reasoning_as_summary)
        self._logprobs: list[dict[str, Any]] = []

    def _handle(self, event: ChatEvent) -> list[StreamEvent]:
        match event:
            case Started():
                self._state.start(event)
                response = self._state.as_object()
                return [
                    {"type": "response.created", "response": response},
                    {"type": "response.in_progress", "response": response},
                ]
            case ToolBegin():
                self._logprobs.clear()
                return self._output.switch(event)
            case Text() | Reasoning() | ToolArguments():
                if isinstance(event, ToolArguments):
                    self._logprobs.clear()
                events = self._output.switch(event)
                delta = self._add(event.delta)
                return events if delta is None else [*events, delta]
            case Finished():
                return self._end(event)
            case _:
                return []

    def _add(self, text: str) -> StreamEvent | None:
        item = self._output.open
        assert item is not None, "it was opened for this"
        item.pieces.append(text)
        if item.delta_event is None:
            return None
        event = {**item.delta_event, "delta": text}
        if self._logprobs and isinstance(item, MessageItem):
            event["logprobs"] = self._logprobs
            item.logprobs += self._logprobs
            self._logprobs = []
        return event

    def _end(self, event: Finished) -> list[StreamEvent]:
        self._state.end(event)
        events: list[StreamEvent] = []
        if self._output.open is None and not self._output.items:
            events += self._output.switch(Text(""))  # clients look for a message
        if isinstance(self._output.open, MessageItem):
            self._output.open.logprobs += self._logprobs
        is_whole = self._state.status == "completed"
        return events + self._output.close("completed" if is_whole else "incomplete")

    def _note_logprobs(self, events: Sequence[ChatEvent]) -> None:
        """Of these events, before they are handled."""
        if self._style.num_top_logprobs is None:
            return
        tokens = [token for one in events if isinstance(one, Logprobs) for token in one.tokens]
        if any(isinstance(one, Reasoning) for one in events):
            last = events[-1]
            if not any(isinstance(one, Text) for one in events):
                tokens = []
            elif isinstance(last, Finished):
                tokens = tokens[last.usage.num_reasoning_tokens :]
        self._logprobs += chat_logprobs(tokens, self._style.num_top_logprobs)

    def _end_object(self) -> dict[str, Any]:
        response = self._state.as_object(self._output.items)
        if self._keep is not None:
            self._keep(msgspec.json.encode(response), self._output.items)
        return response


class ResponseAnswerEncoder(WholeEncoder, _ResponseEncoder):
    """Implements `delivery.Encoder`: the whole response at its end."""

    def feed(self, number: int, events: Sequence[ChatEvent], num_output_tokens: int) -> bytes:
        """Keep them."""
        self._note_logprobs(events)
        for event in events:
            self._handle(event)
        return b""

    def finish(self) -> bytes:
        """The response."""
        return msgspec.json.encode(self._end_object())


class ResponseStreamEncoder(_ResponseEncoder):
    """Implements `delivery.Encoder`."""

    is_stream = True
    keep_alive = COMMENT

    def __init__(self, style: ResponseStyle, keep: Keep | None) -> None:
        super().__init__(style, keep)
        self._number = 0
        self._item: OpenItem | None = None
        self._pieces = (b"", b"", b"")

    def feed(self, number: int, events: Sequence[ChatEvent], num_output_tokens: int) -> bytes:
        """Those of the stream."""
        if len(events) == 1 and not self._logprobs:
            only, item = events[0], self._output.open
            if item is not None and type(item) is _ITEMS.get(type(only)):
                assert isinstance(only, _DELTAS)
                return self._delta(item, only.delta)
        self._note_logprobs(events)
        return b"".join(self._sent(one) for event in events for one in self._handle(event))

    def finish(self) -> bytes:
        """The whole response."""
        kind = "completed" if self._state.status == "completed" else "incomplete"
        return self._sent({"type": f"response.{kind}", "response": self._end_object()})

    def fail(self, error: HttpError) -> bytes:
        """That it has failed: clients look for the one event or for the other."""
        self._output.close("incomplete")
        shown = response_error(error)
        response = self._state.as_object(self._output.items, shown)
        return self._sent({"type": "response.failed", "response": response}) + self._sent(
            {"type": "error", "code": shown["code"], "message": error.message, "param": error.param}
        )

    # -- inside -----------------------------------------------------------------------------------

    def _sent(self, event: StreamEvent) -> bytes:
        event["sequence_number"] = self._number
        self._number += 1
        return named_event(event["type"], event)

    def _delta(self, item: OpenItem, text: str) -> bytes:
        """More of the item that is open."""
        if item is not self._item:
            self._item = item
            assert item.delta_event is not None, "it is of _ITEMS"
            whole = {**item.delta_event, "sequence_number": _NUMBER, "delta": _DELTA}
            head, after = around(whole, _DELTA, item.delta_event["type"])
            before, _, between = head.partition(escaped(_NUMBER))
            self._pieces = before, between, after
        item.pieces.append(text)
        number = self._number
        self._number = number + 1
        before, between, after = self._pieces
        return b"%b%d%b%b%b" % (before, number, between, escaped(text), after)
