"""The items of an answer, as they are being written: events of a chat to those of a response.

One item is open at a time; what belongs to another kind closes it. Stream events are dicts here,
without the sequence number that they get when they are sent.
"""

from __future__ import annotations

from typing import Any, Final, Literal, TypeAlias

import msgspec

from nanocore.client.chat.events import Reasoning, Text, ToolArguments, ToolBegin
from nanocore.http.dialects.response_items import Item, output_text
from nanocore.http.dialects.response_tools import CUSTOM_ARGUMENT

StreamEvent: TypeAlias = dict[str, Any]
Status: TypeAlias = Literal["in_progress", "completed", "incomplete"]
_REASONING_PART: Final = "response.content_part"
_SUMMARY_PART: Final = "response.reasoning_summary_part"


class OpenItem:
    """One that is being written.

    prefix: of its id. delta_event: what more of it is, without the delta; None if it comes at its
    end alone. pieces: what it has so far.
    """

    prefix: str
    delta_event: StreamEvent | None

    def __init__(self, response_key: str, output_index: int) -> None:
        self.pieces: list[str] = []
        self.id = f"{self.prefix}_{response_key}_{output_index}"
        self.place: StreamEvent = {"item_id": self.id, "output_index": output_index}

    @property
    def text(self) -> str:
        """All that it has."""
        return "".join(self.pieces)

    def begun(self) -> list[StreamEvent]:
        """What says that there is a part of it."""
        return []

    def ended(self) -> list[StreamEvent]:
        """What says that nothing more of its part comes."""
        return []

    def item(self, status: Status) -> Item:
        """As it is now."""
        raise NotImplementedError


class MessageItem(OpenItem):
    """What the model says. logprobs: of its tokens, if they were asked for."""

    prefix = "msg"
    delta_event: StreamEvent

    def __init__(self, response_key: str, output_index: int) -> None:
        super().__init__(response_key, output_index)
        self.logprobs: list[dict[str, Any]] = []
        self.place["content_index"] = 0
        kind = "response.output_text.delta"
        self.delta_event = {"type": kind, **self.place, "logprobs": []}

    def begun(self) -> list[StreamEvent]:
        return [{"type": "response.content_part.added", **self.place, "part": output_text("")}]

    def ended(self) -> list[StreamEvent]:
        text = {"text": self.text, "logprobs": self.logprobs}
        part = output_text(self.text, self.logprobs)
        return [
            {"type": "response.output_text.done", **self.place, **text},
            {"type": "response.content_part.done", **self.place, "part": part},
        ]

    def item(self, status: Status) -> Item:
        content = [] if status == "in_progress" else [output_text(self.text, self.logprobs)]
        return {
            "id": self.id,
            "type": "message",
            "status": status,
            "role": "assistant",
            "content": content,
        }


class ReasoningItem(OpenItem):
    """What the model thinks. as_summary: shown where clients look for a summary."""

    prefix = "rs"

    def __init__(self, response_key: str, output_index: int, as_summary: bool) -> None:
        super().__init__(response_key, output_index)
        self._as_summary = as_summary
        self._text_event = "response.reasoning" + ("_summary_text" if as_summary else "_text")
        self._part_event = _SUMMARY_PART if as_summary else _REASONING_PART
        self._kind = "summary_text" if as_summary else "reasoning_text"
        self.place["summary_index" if as_summary else "content_index"] = 0
        self.delta_event = {"type": f"{self._text_event}.delta", **self.place}

    def begun(self) -> list[StreamEvent]:
        return [{"type": f"{self._part_event}.added", **self.place, "part": self._part()}]

    def ended(self) -> list[StreamEvent]:
        return [
            {"type": f"{self._text_event}.done", **self.place, "text": self.text},
            {"type": f"{self._part_event}.done", **self.place, "part": self._part()},
        ]

    def item(self, status: Status) -> Item:
        parts = [] if status == "in_progress" else [self._part()]
        return {
            "id": self.id,
            "type": "reasoning",
            "status": status,
            "summary": parts if self._as_summary else [],
            "content": [] if self._as_summary else parts,
        }

    def _part(self) -> dict[str, Any]:
        return {"type": self._kind, "text": self.text}


class CallItem(OpenItem):
    """A function that the model calls."""

    prefix = "fc"

    def __init__(self, response_key: str, output_index: int, begin: ToolBegin) -> None:
        super().__init__(response_key, output_index)
        self.call = {"call_id": begin.id, "name": begin.name}
        kind = "response.function_call_arguments.delta"
        self.delta_event = {"type": kind, **self.place}

    def ended(self) -> list[StreamEvent]:
        kind = "response.function_call_arguments.done"
        said = {"name": self.call["name"], "arguments": self.text}
        return [{"type": kind, **self.place, **said}]

    def item(self, status: Status) -> Item:
        return {
            "id": self.id,
            "type": "function_call",
            "status": status,
            **self.call,
            "arguments": self.text,
        }


class CustomCallItem(CallItem):
    """A tool that takes a text: of the arguments that the model writes for it, the only one."""

    prefix = "ctc"

    def __init__(self, response_key: str, output_index: int, begin: ToolBegin) -> None:
        super().__init__(response_key, output_index, begin)
        self.delta_event = None

    def ended(self) -> list[StreamEvent]:
        kind = "response.custom_tool_call_input"
        written = self._input()
        return [
            {"type": f"{kind}.delta", **self.place, "delta": written},
            {"type": f"{kind}.done", **self.place, "input": written},
        ]

    def item(self, status: Status) -> Item:
        return {
            "id": self.id,
            "type": "custom_tool_call",
            "status": status,
            **self.call,
            "input": self._input(),
        }

    def _input(self) -> str:
        """As the model wrote it, if that is not what was asked for."""
        try:
            arguments = msgspec.json.decode(self.text)
        except msgspec.DecodeError:
            return self.text
        written = arguments.get(CUSTOM_ARGUMENT) if isinstance(arguments, dict) else None
        return written if isinstance(written, str) else self.text


class Output:
    """All items of an answer.

    Args:
        response_key: what their ids have in common.
        custom_tools: names of those that take a text.
        as_summary: as `ReasoningItem`'s.
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
        """Close what is open and open what this belongs to, where it is not open already."""
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
                assert isinstance(self.open, CallItem), "calls are written one after the other"
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
        """Nothing more comes of what is open."""
        if self.open is None:
            return []
        item = self.open.item(status)
        done = {"type": "response.output_item.done", "output_index": len(self.items), "item": item}
        events = [*self.open.ended(), done]
        self.items.append(item)
        self.open = None
        return events
