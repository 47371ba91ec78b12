"""Tools as callers give them: OpenAI's shape, checked."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Final

import msgspec

from nanocore.protocol.errors import InvalidRequestError, quoted

MAX_TOOLS: Final = 1024
"""Coding agents with several MCP servers send hundreds."""
MAX_TOOL_NAME_CHARS: Final = 128
_NAME: Final = re.compile(r"[A-Za-z0-9_.-]+")


class Tool(msgspec.Struct, frozen=True):
    """A function that the model may call. parameters: a JSON Schema of its arguments' object.

    source: as the caller gave it, for the template. strict: its arguments must match the schema.
    """

    name: str
    parameters: dict[str, Any]
    strict: bool
    source: dict[str, Any]


def read_tools(tools: Sequence[object] | None) -> list[Tool]:
    """The tools of a request.

    Raises:
        InvalidRequestError: one is not {"type": "function", "function": {"name": ...}}, a name is
            not plain or comes twice, or there are more than MAX_TOOLS.
    """
    if tools is None:
        return []
    if isinstance(tools, (str, bytes)) or not isinstance(tools, Sequence):
        raise InvalidRequestError(f"tools are a list of dicts, not {type(tools).__name__}")
    if len(tools) > MAX_TOOLS:
        raise InvalidRequestError(f"{len(tools)} tools: at most {MAX_TOOLS} are allowed")
    read = [_read(i, tool) for i, tool in enumerate(tools)]
    names: set[str] = set()
    for tool in read:
        if tool.name in names:
            raise InvalidRequestError(f"two tools have the name {tool.name!r}: rename one of them")
        names.add(tool.name)
    return read


def _read(i: int, tool: object) -> Tool:
    function = tool.get("function") if isinstance(tool, dict) else None
    if (
        not isinstance(tool, dict)
        or tool.get("type", "function") != "function"
        or not isinstance(function, dict)
    ):
        raise InvalidRequestError(
            f'tools[{i}] must be {{"type": "function", "function": {{"name": str, "description": '
            f'str, "parameters": a JSON Schema}}}}, not {quoted(tool)}'
        )
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name) or len(name) > MAX_TOOL_NAME_CHARS:
        raise InvalidRequestError(
            f"tools[{i}].function.name={quoted(name)}: a name has 1 to "
            f"{MAX_TOOL_NAME_CHARS} letters, digits, and characters of '_.-'"
        )
    parameters = function.get("parameters")
    if parameters is None:
        parameters = {"type": "object", "properties": {}}
    if not isinstance(parameters, dict):
        raise InvalidRequestError(
            f"tools[{i}].function.parameters is no JSON Schema: it must be a dict, not "
            f"{type(parameters).__name__}"
        )
    return Tool(name, parameters, function.get("strict") is True, tool)
