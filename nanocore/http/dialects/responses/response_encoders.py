"""Encoders of /v1/responses: a whole response object, or a stream of named events.

One item is open at a time; an event of another kind closes it. Stream events are dicts until they
are sent, with a sequence number. A delta is a prefix, its sequence number, and a text between two
more pieces; these stay the same while an item is open.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Literal, TypeAlias

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
from nanocore.http.dialects.responses.response_items import CUSTOM_ARGUMENT, Item, output_text
from nanocore.http.http_errors import HttpError

StreamEvent: TypeAlias = dict[str, Any]
Status: TypeAlias = Literal["in_progress", "completed", "incomplete"]
_REASONING_PART: Final = "response.content_part"
_SUMMARY_PART: Final = "response.reasoning_summary_part"
Keep: TypeAlias = Callable[[bytes, list[Item]], None]
"""Called with the response as JSON and its output, before the client gets the end."""
_NUMBER: Final = "\x00number"
_DELTA: Final = "\x00delta"
_DELTAS: Final = (Text, Reasoning, ToolArguments)


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


class OpenItem:
    """Base of items that are being written.

    prefix: of its id. delta_event: event of a delta, without the delta; None if the item is sent
    whole at its end. pieces: its text so far.
    """

    prefix: str
    delta_event: StreamEvent | None

    def __init__(self, response_key: str, output_index: int) -> None:
        self.pieces: list[str] = []
        self.id = f"{self.prefix}_{response_key}_{output_index}"
        self.place: StreamEvent = {"item_id": self.id, "output_index": output_index}

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    def begun(self) -> list[StreamEvent]:
        """Return the events that announce its content part."""
        return []

    def ended(self) -> list[StreamEvent]:
        """Return the events that complete its content part."""
        return []

    def item(self, status: Status) -> Item:
        raise NotImplementedError

    def _event(self, kind: str, **fields: Any) -> StreamEvent:
        return {"type": kind, **self.place, **fields}

    def _item(self, kind: str, status: Status, **fields: Any) -> Item:
        return {"id": self.id, "type": kind, "status": status, **fields}


class MessageItem(OpenItem):
    """Text of the model. logprobs: of its tokens, if requested."""

    prefix = "msg"
    delta_event: StreamEvent

    def __init__(self, response_key: str, output_index: int) -> None:
        super().__init__(response_key, output_index)
        self.logprobs: list[dict[str, Any]] = []
        self.place["content_index"] = 0
        self.delta_event = self._event("response.output_text.delta", logprobs=[])

    def begun(self) -> list[StreamEvent]:
        return [self._event("response.content_part.added", part=output_text(""))]

    def ended(self) -> list[StreamEvent]:
        text, logprobs = self.text, self.logprobs
        return [
            self._event("response.output_text.done", text=text, logprobs=logprobs),
            self._event("response.content_part.done", part=output_text(text, logprobs)),
        ]

    def item(self, status: Status) -> Item:
        content = [] if status == "in_progress" else [output_text(self.text, self.logprobs)]
        return self._item("message", status, role="assistant", content=content)


class ReasoningItem(OpenItem):
    """Reasoning of the model. as_summary: send it as the summary that some clients show."""

    prefix = "rs"

    def __init__(self, response_key: str, output_index: int, as_summary: bool) -> None:
        super().__init__(response_key, output_index)
        self._as_summary = as_summary
        self._text_event = "response.reasoning" + ("_summary_text" if as_summary else "_text")
        self._part_event = _SUMMARY_PART if as_summary else _REASONING_PART
        self._kind = "summary_text" if as_summary else "reasoning_text"
        self.place["summary_index" if as_summary else "content_index"] = 0
        self.delta_event = self._event(f"{self._text_event}.delta")

    def begun(self) -> list[StreamEvent]:
        return [self._event(f"{self._part_event}.added", part=self._part())]

    def ended(self) -> list[StreamEvent]:
        return [
            self._event(f"{self._text_event}.done", text=self.text),
            self._event(f"{self._part_event}.done", part=self._part()),
        ]

    def item(self, status: Status) -> Item:
        parts = [] if status == "in_progress" else [self._part()]
        summary, content = (parts, []) if self._as_summary else ([], parts)
        return self._item("reasoning", status, summary=summary, content=content)

    def _part(self) -> dict[str, Any]:
        return {"type": self._kind, "text": self.text}


class CallItem(OpenItem):
    """A function call."""

    prefix = "fc"

    def __init__(self, response_key: str, output_index: int, begin: ToolBegin) -> None:
        super().__init__(response_key, output_index)
        self.call = {"call_id": begin.id, "name": begin.name}
        self.delta_event = self._event("response.function_call_arguments.delta")

    def ended(self) -> list[StreamEvent]:
        kind = "response.function_call_arguments.done"
        return [self._event(kind, name=self.call["name"], arguments=self.text)]

    def item(self, status: Status) -> Item:
        return self._item("function_call", status, **self.call, arguments=self.text)


class CustomCallItem(CallItem):
    """A call of a custom tool. Its text is the only argument that the model writes."""

    prefix = "ctc"

    def __init__(self, response_key: str, output_index: int, begin: ToolBegin) -> None:
        super().__init__(response_key, output_index, begin)
        self.delta_event = None

    def ended(self) -> list[StreamEvent]:
        kind = "response.custom_tool_call_input"
        written = self._input()
        return [
            self._event(f"{kind}.delta", delta=written),
            self._event(f"{kind}.done", input=written),
        ]

    def item(self, status: Status) -> Item:
        return self._item("custom_tool_call", status, **self.call, input=self._input())

    def _input(self) -> str:
        try:
            arguments = msgspec.json.decode(self.text)
        except msgspec.DecodeError:
            return self.text
        # Malformed arguments are passed on as the model wrote them.
        written = arguments.get(CUSTOM_ARGUMENT) if isinstance(arguments, dict) else None
        return written if isinstance(written, str) else self.text


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
        self._items: list[Item] = []
        self._open: OpenItem | None = None
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
                return self._switch(event)
            case Text() | Reasoning() | ToolArguments():
                if isinstance(event, ToolArguments):
                    self._logprobs.clear()
                events = self._switch(event)
                delta = self._add(event.delta)
                return events if delta is None else [*events, delta]
            case Finished():
                return self._end(event)
            case _:
                return []

    def _switch(self, event: Text | Reasoning | ToolBegin | ToolArguments) -> list[StreamEvent]:
        """Open the item that this event belongs to, unless it is open, and close another one."""
        index = len(self._items) + (self._open is not None)
        item: OpenItem
        match event:
            case Text():
                if isinstance(self._open, MessageItem):
                    return []
                item = MessageItem(self._style.key, index)
            case Reasoning():
                if isinstance(self._open, ReasoningItem):
                    return []
                item = ReasoningItem(self._style.key, index, self._style.reasoning_as_summary)
            case ToolBegin():
                kind = CustomCallItem if event.name in self._style.custom_tools else CallItem
                item = kind(self._style.key, index, event)
            case ToolArguments():
                assert isinstance(self._open, CallItem), "arguments follow their call"
                return []
        events = self._close("completed")
        self._open = item
        added = {
            "type": "response.output_item.added",
            "output_index": index,
            "item": item.item("in_progress"),
        }
        return [*events, added, *item.begun()]

    def _close(self, status: Status) -> list[StreamEvent]:
        if self._open is None:
            return []
        item = self._open.item(status)
        done = {"type": "response.output_item.done", "output_index": len(self._items), "item": item}
        events = [*self._open.ended(), done]
        self._items.append(item)
        self._open = None
        return events

    def _add(self, text: str) -> StreamEvent | None:
        item = self._open
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
        if self._open is None and not self._items:
            events += self._switch(Text(""))  # clients expect a message
        if isinstance(self._open, MessageItem):
            self._open.logprobs += self._logprobs
        is_whole = self._status == "completed"
        return events + self._close("completed" if is_whole else "incomplete")

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
        response = self._response(self._items)
        if self._keep is not None:
            self._keep(msgspec.json.encode(response), self._items)
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
            only, item = events[0], self._open
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
        self._close("incomplete")
        shown = response_error(error)
        response = self._response(self._items, shown)
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
