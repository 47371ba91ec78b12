"""Encoders of /v1/responses: a whole response object, or a stream of named events.

A delta is a prefix, its sequence number, and a text between two more pieces; these stay the same
while an item is open.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
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
from nanocore.http.dialects.encoding import COMMENT, UsageSum, WholeEncoder, around, escaped
from nanocore.http.dialects.encoding import event as named_event
from nanocore.http.dialects.openai_logprobs import chat_logprobs
from nanocore.http.dialects.responses.response_items import Item
from nanocore.http.dialects.responses.response_output import (
    CallItem,
    MessageItem,
    OpenItem,
    ReasoningItem,
    ResponseOutput,
    StreamEvent,
)
from nanocore.http.http_errors import HttpError


class ResponseStyle(msgspec.Struct, frozen=True, kw_only=True):
    """Content of a response that is not in its events, and how these are shown.

    key: common part of the ids of the response and its items. request_fields: fields of the
    response that repeat the request. num_top_logprobs: None shows no logprobs.
    """

    key: str
    created_s: int
    request_fields: Mapping[str, Any]
    num_top_logprobs: int | None = None
    custom_tools: frozenset[str] = frozenset()
    reasoning_as_summary: bool = False

    @property
    def id(self) -> str:
        return f"resp_{self.key}"


def response_error(error: HttpError) -> dict[str, Any]:
    """Return the `error` of a failed response, with a code that clients know."""
    code = "server_error" if error.status >= 500 else "invalid_prompt"
    if error.status == 429:
        code = "rate_limit_exceeded"
    return {"code": code, "message": error.message}


Keep: TypeAlias = Callable[[bytes, list[Item]], None]
"""Called with the response as JSON and its output, before the client gets the end."""
_NUMBER: Final = "\x00number"
_DELTA: Final = "\x00delta"
_DELTAS: Final = (Text, Reasoning, ToolArguments)
_ITEMS: Final = {Text: MessageItem, Reasoning: ReasoningItem, ToolArguments: CallItem}
"""Items by the events of their deltas; custom calls have none."""


class _ResponseBase:
    """Base of both encoders: the response, its items, and the logprobs of its text.

    Logprobs arrive after their text, or before it while the text is held back. Those of reasoning
    are not shown; in a stream, those of calls are not, either. A whole response gets them in one
    piece, and its first text gets all that follow the reasoning.
    """

    def __init__(self, style: ResponseStyle, keep: Keep | None) -> None:
        self._style = style
        self._keep = keep
        self._usage = UsageSum()
        self._seed: int | None = None
        self._finished: Finished | None = None
        self._output = ResponseOutput(style.key, style.custom_tools, style.reasoning_as_summary)
        self._logprobs: list[dict[str, Any]] = []

    def _handle(self, event: ChatEvent) -> list[StreamEvent]:
        match event:
            case Started():
                self._usage.add_prompt(len(event.prompt_token_ids), event.num_cached_tokens)
                self._seed = event.seed
                response = self._response()
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
        assert item is not None, "`switch` has opened it"
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
        self._usage.add_sample(event.usage)
        self._finished = event
        events: list[StreamEvent] = []
        if self._output.open is None and not self._output.items:
            events += self._output.switch(Text(""))  # clients expect a message
        if isinstance(self._output.open, MessageItem):
            self._output.open.logprobs += self._logprobs
        is_whole = self._status == "completed"
        return events + self._output.close("completed" if is_whole else "incomplete")

    def _note_logprobs(self, events: Sequence[ChatEvent]) -> None:
        # Called before the events are handled, so that text gets the logprobs of its tokens.
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
        response = self._response(self._output.items)
        if self._keep is not None:
            self._keep(msgspec.json.encode(response), self._output.items)
        return response

    @property
    def _status(self) -> str:
        """The response's status; "incomplete" if a token limit has ended it."""
        reason = "" if self._finished is None else self._finished.finish_reason
        if reason in ("stop", "tool_calls"):
            return "completed"
        return {"": "in_progress", "length": "incomplete"}.get(reason, "cancelled")

    def _response(
        self, output: Sequence[Item] = (), error: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """Return the response object. error: why it has failed."""
        status = "failed" if error is not None else self._status
        cut = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return {
            "id": self._style.id,
            "object": "response",
            "created_at": self._style.created_s,
            "completed_at": int(time.time()) if status == "completed" else None,
            "status": status,
            "error": error,
            "incomplete_details": cut,
            "output": output,
            "usage": None if status == "in_progress" else self._usage_object(),
            "seed": self._seed,
            **self._style.request_fields,
        }

    def _usage_object(self) -> dict[str, Any]:
        usage = self._usage
        return {
            "input_tokens": usage.num_prompt_tokens,
            "input_tokens_details": {
                "cached_tokens": usage.num_cached_tokens,
                "cache_write_tokens": 0,
            },
            "output_tokens": usage.num_output_tokens,
            "output_tokens_details": {"reasoning_tokens": usage.num_reasoning_tokens},
            "total_tokens": usage.num_prompt_tokens + usage.num_output_tokens,
        }


class ResponseEncoder(WholeEncoder, _ResponseBase):
    """Encoder of a whole response; see `delivery.Encoder`."""

    def feed(self, number: int, events: Sequence[ChatEvent], num_output_tokens: int) -> bytes:
        self._note_logprobs(events)
        for event in events:
            self._handle(event)
        return b""

    def finish(self) -> bytes:
        return msgspec.json.encode(self._end_object())


class ResponseStreamEncoder(_ResponseBase):
    """Encoder of a stream of events; see `delivery.Encoder`."""

    is_stream = True
    keep_alive = COMMENT

    def __init__(self, style: ResponseStyle, keep: Keep | None) -> None:
        super().__init__(style, keep)
        self._number = 0
        self._item: OpenItem | None = None
        self._pieces = (b"", b"", b"")

    def feed(self, number: int, events: Sequence[ChatEvent], num_output_tokens: int) -> bytes:
        if len(events) == 1 and not self._logprobs:
            only, item = events[0], self._output.open
            if item is not None and type(item) is _ITEMS.get(type(only)):
                assert isinstance(only, _DELTAS)
                return self._delta(item, only.delta)
        self._note_logprobs(events)
        return b"".join(self._encoded(one) for event in events for one in self._handle(event))

    def finish(self) -> bytes:
        kind = "completed" if self._status == "completed" else "incomplete"
        return self._encoded({"type": f"response.{kind}", "response": self._end_object()})

    def fail(self, error: HttpError) -> bytes:
        # Some clients look for response.failed, others for error.
        self._output.close("incomplete")
        shown = response_error(error)
        response = self._response(self._output.items, shown)
        return self._encoded({"type": "response.failed", "response": response}) + self._encoded(
            {"type": "error", "code": shown["code"], "message": error.message, "param": error.param}
        )

    def _encoded(self, event: StreamEvent) -> bytes:
        event["sequence_number"] = self._number
        self._number += 1
        return named_event(event["type"], event)

    def _delta(self, item: OpenItem, text: str) -> bytes:
        # Fast path of nearly every token: only the text is encoded, pieces are joined.
        if item is not self._item:
            self._item = item
            assert item.delta_event is not None, "items of _ITEMS have one"
            whole = {**item.delta_event, "sequence_number": _NUMBER, "delta": _DELTA}
            head, after = around(whole, _DELTA, item.delta_event["type"])
            before, _, between = head.partition(escaped(_NUMBER))
            self._pieces = before, between, after
        item.pieces.append(text)
        number = self._number
        self._number = number + 1
        before, between, after = self._pieces
        return b"%b%d%b%b%b" % (before, number, between, escaped(text), after)
