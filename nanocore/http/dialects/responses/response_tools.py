"""Tools and tool_choice of /v1/responses, converted to those of a chat.

The client runs functions and "custom" tools. Custom tools take a text: a model calls them as
functions with one argument. Tools that a vendor's servers run are dropped, not refused, because
agents list them for every server.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from nanocore.http.dialects.chat_options import read_allowed_tools
from nanocore.http.http_errors import bad_request
from nanocore.protocol.errors import quoted

CUSTOM_ARGUMENT: Final = "input"
_OURS: Final = ("function", "custom")


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
