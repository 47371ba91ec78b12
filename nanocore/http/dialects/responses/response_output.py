"""Output items of a response while they are written: chat events to stream events.

One item is open at a time; an event of another kind closes it. Stream events are dicts here,
without the sequence number that they get when they are sent.
"""

from __future__ import annotations

from typing import Any, Final, Literal, TypeAlias

import msgspec

from nanocore.client.chat.events import Reasoning, Text, ToolArguments, ToolBegin
from nanocore.http.dialects.responses.response_items import Item, output_text
from nanocore.http.dialects.responses.response_tools import CUSTOM_ARGUMENT

StreamEvent: TypeAlias = dict[str, Any]
Status: TypeAlias = Literal["in_progress", "completed", "incomplete"]
_REASONING_PART: Final = "response.content_part"
_SUMMARY_PART: Final = "response.reasoning_summary_part"


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


class ResponseOutput:
    """All output items of a response.

    Args:
        response_key: common part of their ids.
        custom_tools: names of custom tools.
        as_summary: see `ReasoningItem`.
    """

    def __init__(
        self,
        response_key: str,
        custom_tools: frozenset[str] = frozenset(),
        as_summary: bool = False,
    ) -> None:
        self._key = response_key
        self._custom_tools = custom_tools
        self._as_summary = as_summary
        self.items: list[Item] = []
        self.open: OpenItem | None = None

    def switch(self, event: Text | Reasoning | ToolBegin | ToolArguments) -> list[StreamEvent]:
        """Open the item that this event belongs to, unless it is open, and close another one."""
        index = len(self.items) + (self.open is not None)
        item: OpenItem
        match event:
            case Text():
                if isinstance(self.open, MessageItem):
                    return []
                item = MessageItem(self._key, index)
            case Reasoning():
                if isinstance(self.open, ReasoningItem):
                    return []
                item = ReasoningItem(self._key, index, self._as_summary)
            case ToolBegin():
                kind = CustomCallItem if event.name in self._custom_tools else CallItem
                item = kind(self._key, index, event)
            case ToolArguments():
                assert isinstance(self.open, CallItem), "arguments follow their call"
                return []
        events = self.close("completed")
        self.open = item
        added = {
            "type": "response.output_item.added",
            "output_index": index,
            "item": item.item("in_progress"),
        }
        return [*events, added, *item.begun()]

    def close(self, status: Status) -> list[StreamEvent]:
        if self.open is None:
            return []
        item = self.open.item(status)
        done = {"type": "response.output_item.done", "output_index": len(self.items), "item": item}
        events = [*self.open.ended(), done]
        self.items.append(item)
        self.open = None
        return events
