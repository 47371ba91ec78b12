"""Messages of a conversation, as callers give them and as templates get them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal, NotRequired, TypedDict

_MAX_INT_BITS: Final = 8192
LONG_CHARS: Final = 1 << 16
"""Characters above which a text or conversation is long: tokenizing takes 50 ms to seconds."""
ROLES: Final = ("system", "developer", "user", "assistant", "tool")
"""Roles of OpenAI's API; templates may know others, too."""
REASONING_KEYS: Final = ("reasoning_content", "thinking", "reasoning")
"""Keys of a turn's reasoning in clients and templates; the first that is present is used."""


class MessageTextPart(TypedDict):
    """A part of a message's content."""

    type: Literal["text"]
    text: str


class MessageFunction(TypedDict):
    """Called function. arguments: an object, or its JSON text."""

    name: str
    arguments: str | dict[str, Any]


class MessageToolCall(TypedDict):
    """A call that the model made."""

    id: NotRequired[str]
    type: NotRequired[Literal["function"]]
    function: MessageFunction


class ChatMessage(TypedDict):
    """One turn of a conversation, as in OpenAI's API.

    role: "system", "developer", "user", "assistant", "tool" or another one that the model's
    template knows. content: text, or parts. reasoning_content, tool_calls: the assistant's.
    tool_call_id: the call whose result this is. Further keys are for templates that use them.
    """

    role: str
    content: NotRequired[str | list[MessageTextPart] | list[dict[str, Any]] | None]
    name: NotRequired[str | None]
    reasoning_content: NotRequired[str | None]
    tool_calls: NotRequired[list[MessageToolCall] | list[dict[str, Any]] | None]
    tool_call_id: NotRequired[str | None]


def template_message(message: object) -> dict[str, Any]:
    """Return a copy as templates get it: without values of None, its reasoning under all keys.

    Raises:
        TypeError: it is no dict, or has values that JSON cannot represent.
    """
    if not isinstance(message, Mapping):
        raise TypeError(f"a message is a dict with a role, not {type(message).__name__}")
    turn: dict[str, Any] = plain({k: v for k, v in message.items() if v is not None})
    reasoning = next((turn[key] for key in REASONING_KEYS if key in turn), None)
    if reasoning is not None:
        turn = {"thinking": reasoning, **turn, "reasoning_content": reasoning}
    return turn


def is_long(*given: object) -> bool:
    """Whether the texts in a JSON value have more than LONG_CHARS; each value adds 16."""
    num_chars = LONG_CHARS
    values = [*given]
    while values and num_chars >= 0:
        value = values.pop()
        num_chars -= 16 + (len(value) if isinstance(value, str) else 0)
        if isinstance(value, Mapping):
            values += value.values()
        elif isinstance(value, (list, tuple)):
            values += value
    return num_chars < 0


def plain(value: object) -> Any:
    """Copy a JSON value, tuples as lists; raises TypeError for anything else."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        if value.bit_length() > _MAX_INT_BITS:  # Python refuses to write longer integers
            raise TypeError(f"integers have at most {_MAX_INT_BITS} bits, not {value.bit_length()}")
        return int.__int__(value)
    if isinstance(value, float):
        return float.__float__(value)
    if isinstance(value, Mapping):
        return {_key(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    raise TypeError(
        "only what JSON can hold (strings, numbers, true, false, null, lists, objects) is allowed, "
        f"not {type(value).__name__}"
    )


def _key(key: object) -> str:
    if not isinstance(key, str):
        raise TypeError(f"keys are strings, not {type(key).__name__}")
    return str.__str__(key)
