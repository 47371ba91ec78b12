"""Input of /v1/responses: items become chat messages, and tools those of a chat.

Items are stored and listed in one form: messages have a role and a list of text parts, calls and
their outputs a call_id, and all an id. Items of tools that a vendor's servers run (search, computer
use, remote tools) are skipped; unknown types are refused.

The client runs functions and "custom" tools. Custom tools take a text: a model calls them as
functions with one argument. Tools that a vendor's servers run are dropped, not refused, because
agents list them for every server.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeAlias

import msgspec

from nanocore.http.dialects.chat_options import read_allowed_tools
from nanocore.http.http_errors import HttpError, bad_request
from nanocore.protocol.errors import quoted
from nanocore.protocol.fields import json_kind

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
"""Types of parts that are text, and the field that holds it."""
_SKIPPED: Final = frozenset(
    {
        "apply_patch_call", "apply_patch_call_output", "code_interpreter_call", "computer_call",
        "computer_call_output", "file_search_call", "image_generation_call", "local_shell_call",
        "local_shell_call_output", "mcp_approval_request", "mcp_approval_response", "mcp_call",
        "mcp_list_tools", "shell_call", "shell_call_output", "tool_search_call",
        "tool_search_output", "web_search_call",
    }
)  # fmt: skip
_LEADING = ("system", "developer")
CUSTOM_ARGUMENT: Final = "input"
_OURS: Final = ("function", "custom")


class ItemReader:
    """Reads the input of one request.

    Args:
        response_key: common part of the ids of its items.
        find: returns the stored item of an id, for references.
    """

    def __init__(self, response_key: str, find: Callable[[str], Item | None]) -> None:
        self._key = response_key
        self._find = find
        self._number = 0

    def read(self, given: str | list[Any]) -> list[Item]:
        """Return the input's items; a text is a message of the user.

        Raises:
            HttpError: an item is invalid, or refers to one that is not stored.
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
            raise _bad(place, f"is an object, not {json_kind(item)}")
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
        raise _bad(f"{place}.type", f"is {kind!r}, which is not supported: leave it out")

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
        # encrypted_content is ignored: only the server that encrypted it can read it.
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
                f"{place} refers to {item_id!r}, which is not stored: send the item itself, as "
                "clients do with store: false",
                "item_not_found",
                f"{place}.id",
            )
        return found

    def _with_id(self, prefix: str, item: Mapping[str, Any], **fields: Any) -> Item:
        given = item.get("id")
        own = f"{prefix}_{self._key}_in{self._number}"
        return {"id": given if isinstance(given, str) and given else own, **fields}


def output_text(text: str, logprobs: list[dict[str, Any]] | None = None) -> dict[str, Any]:
    """Return the part of a message that holds its text."""
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs or []}


def texts_in(parts: list[Any]) -> list[str]:
    """Return the texts of parts that `ItemReader` has read."""
    return [part["text"] for part in parts]


def _text_or_texts(content: Any, place: str) -> list[str]:
    return [content or ""] if isinstance(content, str | None) else _texts(content, place)


def _texts(parts: Any, place: str) -> list[str]:
    if not isinstance(parts, list):
        raise _bad(place, f"is a text or a list of parts, not {json_kind(parts)}")
    texts = []
    for number, part in enumerate(parts):
        kind = part.get("type") if isinstance(part, dict) else None
        key = _TEXT_KEYS.get(kind) if isinstance(kind, str) else None
        text = part.get(key) if key else None
        if key and not isinstance(text, str):
            raise _bad(f"{place}[{number}].{key}", f"is a string, not {json_kind(text)}")
        if not isinstance(text, str):
            what = repr(kind) if isinstance(kind, str) else "something else"
            raise _bad(f"{place}[{number}]", f"is a text, not {what}: this model reads text only")
        texts.append(text)
    return texts


def _text(item: Mapping[str, Any], key: str, place: str) -> str:
    value = item.get(key)
    if not isinstance(value, str):
        raise _bad(f"{place}.{key}", f"is a string, not {json_kind(value)}")
    return value


def _bad(place: str, what: str) -> HttpError:
    return bad_request(f"{place} {what}", place)


def messages_of(items: Sequence[Item], instructions: str | None) -> list[dict[str, Any]]:
    """Return the chat messages of a conversation, for the template.

    Consecutive items of the assistant (reasoning, text, calls) become one turn. Leading system and
    developer messages become one, because many templates accept no second.

    Args:
        items: as read by `ItemReader`, or as in a response's output.
        instructions: precede the items as a system message.
    """
    messages: list[dict[str, Any]] = []
    if instructions:
        messages.append({"role": "system", "content": instructions})
    names: dict[str, str] = {}
    turn: _Turn | None = None
    for item in items:
        kind = item["type"]
        if kind in ("reasoning", "function_call", "custom_tool_call") or (
            item.get("role") == "assistant"
        ):
            if turn is None:
                turn = _Turn()
            turn.add(item)
            if "call_id" in item:
                names[item["call_id"]] = item["name"]
            continue
        if turn is not None:
            messages.append(turn.message())
            turn = None
        if kind == "message":
            messages.append({"role": item["role"], "content": _content(item)})
        else:
            call_id = item["call_id"]
            result = {"role": "tool", "tool_call_id": call_id, "content": item["output"]}
            messages.append(result | ({"name": names[call_id]} if call_id in names else {}))
    if turn is not None:
        messages.append(turn.message())
    return _with_one_head(messages)


class _Turn:
    """A turn of the assistant, made of several items."""

    def __init__(self) -> None:
        self._texts: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[dict[str, Any]] = []

    def add(self, item: Item) -> None:
        match item["type"]:
            case "message":
                self._texts += texts_in(item["content"])
            case "reasoning":
                self._reasoning += texts_in(item.get("content") or item["summary"])
            case "function_call":
                self._add_call(item, item["arguments"])
            case _:
                self._add_call(item, msgspec.json.encode({"input": item["input"]}).decode())

    def _add_call(self, item: Item, arguments: str) -> None:
        function = {"name": item["name"], "arguments": arguments}
        self._calls.append({"id": item["call_id"], "type": "function", "function": function})

    def message(self) -> dict[str, Any]:
        content = "\n".join(self._texts)
        turn: dict[str, Any] = {"role": "assistant", "content": content}
        if self._reasoning:
            turn["reasoning_content"] = "\n".join(self._reasoning)
        if self._calls:
            turn["content"] = content or None
            turn["tool_calls"] = self._calls
        return turn


def _content(item: Item) -> str | list[dict[str, Any]]:
    texts = texts_in(item["content"])
    if len(texts) == 1:
        return texts[0]
    return [{"type": "text", "text": text} for text in texts]


def _with_one_head(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    num = next((i for i, m in enumerate(messages) if m["role"] not in _LEADING), len(messages))
    if num < 2:
        return messages
    texts: list[str] = []
    for message in messages[:num]:
        content = message["content"]
        texts += [content] if isinstance(content, str) else texts_in(content)
    return [{"role": "system", "content": "\n\n".join(texts)}, *messages[num:]]


class ResponseTools(msgspec.Struct, frozen=True):
    """Tools of a request.

    tools, choice: for the chat. shown: for the response object. custom: names of custom tools.
    dropped: unsupported types among the tools.
    """

    tools: list[dict[str, Any]] | None
    choice: str | dict[str, Any] | None
    shown: list[dict[str, Any]]
    custom: frozenset[str]
    dropped: list[str]


def read_response_tools(
    given: list[dict[str, Any]] | None, choice: str | dict[str, Any] | None
) -> ResponseTools:
    """Read tools and tool_choice. Names and parameters are checked when the chat is prepared.

    Raises:
        HttpError: tool_choice is invalid.
    """
    given = given or []
    ours = [tool for tool in given if tool.get("type", "function") in _OURS]
    dropped = [str(tool["type"]) for tool in given if tool.get("type", "function") not in _OURS]
    allowed, chosen = None, None
    if ours or not given:  # else the choice refers to dropped tools
        allowed, chosen = _read_choice(choice, {str(tool.get("name")) for tool in ours}, dropped)
    tools = [
        _chat_tool(tool) for tool in ours if allowed is None or str(tool.get("name")) in allowed
    ]
    return ResponseTools(
        tools=tools or None,
        choice=chosen if tools or chosen != "auto" else None,
        shown=[_shown(tool) for tool in ours],
        custom=frozenset(str(tool.get("name")) for tool in ours if tool.get("type") == "custom"),
        dropped=list(dict.fromkeys(dropped)),
    )


def _read_choice(
    choice: str | dict[str, Any] | None, names: set[str], dropped: list[str]
) -> tuple[set[str] | None, str | dict[str, Any] | None]:
    """Return the names of callable tools (None: all) and the chat's tool_choice."""
    if not isinstance(choice, dict):
        return None, choice
    kind = choice.get("type")
    if kind == "allowed_tools":
        return read_allowed_tools(choice, names)
    if kind in _OURS:
        return None, {"type": "function", "function": {"name": choice.get("name")}}
    if kind in dropped:
        return None, "auto"
    raise bad_request(
        "tool_choice is none, auto, required, or an object of type function, custom or "
        f"allowed_tools, not {quoted(choice)}",
        "tool_choice",
    )


def _chat_tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    if tool.get("type") == "custom":
        return {"type": "function", "function": _custom_function(tool)}
    function = {
        key: value
        for key in ("name", "description", "parameters", "strict")
        if (value := tool.get(key)) is not None
    }
    return {"type": "function", "function": function}


def _custom_function(tool: Mapping[str, Any]) -> dict[str, Any]:
    description = str(tool.get("description") or "")
    form = tool.get("format")
    if isinstance(form, dict) and form.get("type") == "grammar":
        syntax, definition = form.get("syntax"), form.get("definition")
        description += f"\n\nThe input matches this {syntax} grammar:\n{definition}"
    return {
        "name": tool.get("name"),
        "description": description.strip(),
        "parameters": {
            "type": "object",
            "properties": {CUSTOM_ARGUMENT: {"type": "string"}},
            "required": [CUSTOM_ARGUMENT],
            "additionalProperties": False,
        },
    }


def _shown(tool: Mapping[str, Any]) -> dict[str, Any]:
    if tool.get("type") == "custom":
        return dict(tool)
    # Clients expect all fields.
    blank = {"description": None, "parameters": None, "strict": None}
    return {"type": "function", "name": None, **blank, **tool}
