"""Input items of /v1/responses: read, checked, and put in one form.

In that form they are kept and listed: messages have a role and a list of text parts, calls and
their outputs a call_id, and everything an id. What only vendors' servers can do (searches,
computers, remote tools) is left out of a conversation; what nobody knows is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, TypeAlias

from nanocore.http.errors import HttpError, bad_request

Item: TypeAlias = dict[str, Any]
ROLES: Final = ("user", "assistant", "system", "developer")
_TEXT_KEYS: Final = {
    "input_text": "text",
    "output_text": "text",
    "text": "text",
    "reasoning_text": "text",
    "summary_text": "text",
    "refusal": "refusal",
}
"""Kinds of parts that are text, and where they have it."""
_SKIPPED: Final = frozenset(
    {
        "apply_patch_call", "apply_patch_call_output", "code_interpreter_call", "computer_call",
        "computer_call_output", "file_search_call", "image_generation_call", "local_shell_call",
        "local_shell_call_output", "mcp_approval_request", "mcp_approval_response", "mcp_call",
        "mcp_list_tools", "shell_call", "shell_call_output", "tool_search_call",
        "tool_search_output", "web_search_call",
    }
)  # fmt: skip


class ItemReader:
    """Of one request.

    Args:
        response_key: what the ids of its items have in common.
        find: the stored item of an id, for references.
    """

    def __init__(self, response_key: str, find: Callable[[str], Item | None]) -> None:
        self._key = response_key
        self._find = find
        self._number = 0

    def read(self, given: str | list[Any]) -> list[Item]:
        """A text, which is the user's, or items.

        Raises:
            HttpError: one is not what it must be, or refers to one that is not here.
        """
        if isinstance(given, str):
            given = [{"role": "user", "content": given}]
        items = []
        for number, item in enumerate(given):
            self._number = number
            read = self._read(item, f"input[{number}]")
            if read is not None:
                items.append(read)
        return items

    def _read(self, item: Any, place: str) -> Item | None:
        if not isinstance(item, dict):
            raise _bad(place, f"is an object, not {type(item).__name__}")
        kind = item.get("type")
        if kind is None:
            kind = "message" if "role" in item else "item_reference"
        match kind:
            case "message":
                return self._message(item, place)
            case "item_reference":
                return self._referred(item, place)
            case "reasoning":
                return self._reasoning(item, place)
            case "function_call" | "custom_tool_call":
                return self._call(item, kind, place)
            case "function_call_output" | "custom_tool_call_output":
                output = "\n".join(_text_or_texts(item.get("output"), f"{place}.output"))
                call_id = _text(item, "call_id", place)
                return self._with_id("fco", item, type=kind, call_id=call_id, output=output)
            case str() if kind in _SKIPPED:
                return None
        raise _bad(f"{place}.type", f"is {kind!r}, which this server does not know: leave it out")

    def _message(self, item: Mapping[str, Any], place: str) -> Item:
        role = item.get("role")
        if role not in ROLES:
            raise _bad(f"{place}.role", f"is one of {', '.join(ROLES)}, not {role!r}")
        texts = _text_or_texts(item.get("content"), f"{place}.content")
        if role == "assistant":
            parts = [output_text(text) for text in texts]
        else:
            parts = [{"type": "input_text", "text": text} for text in texts]
        return self._with_id(
            "msg", item, type="message", role=role, status="completed", content=parts
        )

    def _reasoning(self, item: Mapping[str, Any], place: str) -> Item:
        """What is encrypted was made by others, and is no text for us."""
        content = _texts(item.get("content") or [], f"{place}.content")
        summary = _texts(item.get("summary") or [], f"{place}.summary")
        return self._with_id(
            "rs",
            item,
            type="reasoning",
            summary=[{"type": "summary_text", "text": text} for text in summary],
            content=[{"type": "reasoning_text", "text": text} for text in content],
        )

    def _call(self, item: Mapping[str, Any], kind: str, place: str) -> Item:
        is_custom = kind == "custom_tool_call"
        written = "input" if is_custom else "arguments"
        fields = {key: _text(item, key, place) for key in ("call_id", "name", written)}
        prefix = "ctc" if is_custom else "fc"
        return self._with_id(prefix, item, type=kind, **fields, status="completed")

    def _referred(self, item: Mapping[str, Any], place: str) -> Item:
        item_id = _text(item, "id", place)
        found = self._find(item_id)
        if found is None:
            raise HttpError(
                404,
                f"{place} refers to {item_id!r}, which is not stored here (any more): send the "
                "item itself; clients do so with store: false",
                "item_not_found",
                f"{place}.id",
            )
        return found

    def _with_id(self, prefix: str, item: Mapping[str, Any], **fields: Any) -> Item:
        """It keeps the id that it has."""
        given = item.get("id")
        own = f"{prefix}_{self._key}_in{self._number}"
        return {"id": given if isinstance(given, str) and given else own, **fields}


def output_text(text: str, logprobs: list[dict[str, Any]] | None = None) -> dict[str, Any]:
    """The part of an answer that is its text."""
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs or []}


def texts_in(parts: list[Any]) -> list[str]:
    """Of parts that were read before."""
    return [part["text"] for part in parts]


def _text_or_texts(content: Any, place: str) -> list[str]:
    """Of a text, or of parts; without any it is empty."""
    return [content or ""] if isinstance(content, str | None) else _texts(content, place)


def _texts(parts: Any, place: str) -> list[str]:
    if not isinstance(parts, list):
        raise _bad(place, f"is a text or a list of parts, not {type(parts).__name__}")
    texts = []
    for number, part in enumerate(parts):
        kind = part.get("type") if isinstance(part, dict) else None
        key = _TEXT_KEYS.get(kind) if isinstance(kind, str) else None
        text = part.get(key) if key else None
        if key and not isinstance(text, str):
            raise _bad(f"{place}[{number}].{key}", f"is a string, not {type(text).__name__}")
        if not isinstance(text, str):
            what = repr(kind) if isinstance(kind, str) else "something else"
            raise _bad(f"{place}[{number}]", f"is a text, not {what}: models here read text alone")
        texts.append(text)
    return texts


def _text(item: Mapping[str, Any], key: str, place: str) -> str:
    value = item.get(key)
    if not isinstance(value, str):
        raise _bad(f"{place}.{key}", f"is a string, not {type(value).__name__}")
    return value


def _bad(place: str, what: str) -> HttpError:
    return bad_request(f"{place} {what}", place)
