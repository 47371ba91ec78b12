"""What requests hold where their types say "any object": for the OpenAPI document alone.

Messages and tools are looked at by the client's chat, which says what is wrong with one; what is
here is what it takes, so that a reader of the document can write some.
"""

from __future__ import annotations

from typing import Any, Final, Literal

import msgspec


class TextPart(msgspec.Struct, tag_field="type", tag="text"):
    """A piece of a message."""

    text: str


class FunctionOfCall(msgspec.Struct):
    """arguments: JSON, as the model wrote it."""

    name: str
    arguments: str


class EarlierToolCall(msgspec.Struct):
    """A call of an earlier turn."""

    id: str
    function: FunctionOfCall
    type: Literal["function"] = "function"


class ChatMessage(msgspec.Struct):
    """A turn of the conversation."""

    role: Literal["developer", "system", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    tool_calls: list[EarlierToolCall] | None = None
    tool_call_id: str | None = None
    name: str | None = None


class ToolFunction(msgspec.Struct):
    """parameters: JSON Schema of the arguments."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ChatTool(msgspec.Struct):
    """A function that the client runs; tools of other types are dropped."""

    type: Literal["function"]
    function: ToolFunction


PARTS: Final = (ChatMessage, ChatTool)


def _list_of(name: str, at_least: int = 0) -> dict[str, Any]:
    return {"items": {"$ref": f"#/components/schemas/{name}"}, "minItems": at_least}


DETAILS: Final[dict[tuple[str, str], dict[str, Any]]] = {
    ("ChatCompletionRequest", "messages"): _list_of("ChatMessage", 1),
    ("ChatCompletionRequest", "tools"): _list_of("ChatTool"),
    ("TokenizeRequest", "messages"): _list_of("ChatMessage", 1),
    ("TokenizeRequest", "tools"): _list_of("ChatTool"),
    ("ResponsesRequest", "input"): _list_of("ChatMessage", 1),
}
"""JSON Schema keywords of lists, by the name of the body's type and of its field."""
