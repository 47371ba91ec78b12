"""Tools of a request: OpenAI's shape, `tool_choice`, and their JSON Schemas."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Final, Literal

import msgspec
from msgspec.structs import replace

from nanocore.protocol.errors import InvalidRequestError, quoted

MAX_TOOLS: Final = 1024
"""Limit of tools in a request; coding agents with several MCP servers send hundreds."""
MAX_TOOL_NAME_CHARS: Final = 128
_NAME: Final = re.compile(r"[A-Za-z0-9_.-]+")


class Tool(msgspec.Struct, frozen=True):
    """A function that the model may call. parameters: JSON Schema of its arguments.

    source: the caller's object, for the template. strict: arguments must match the schema.
    """

    name: str
    parameters: dict[str, Any]
    strict: bool
    source: dict[str, Any]


def read_tools(tools: Sequence[object] | None) -> list[Tool]:
    """Read the tools; raises InvalidRequestError if one is malformed or a name comes twice."""
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
            f'str, "parameters": a JSON Schema}}}}, not {quoted(tool)}',
            f"tools[{i}]",
        )
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name) or len(name) > MAX_TOOL_NAME_CHARS:
        raise InvalidRequestError(
            f"tools[{i}].function.name={quoted(name)}: a name has 1 to "
            f"{MAX_TOOL_NAME_CHARS} letters, digits, and characters of '_.-'",
            f"tools[{i}].function.name",
        )
    parameters = function.get("parameters")
    if parameters is None:
        parameters = {"type": "object", "properties": {}}
    if not isinstance(parameters, dict):
        raise InvalidRequestError(
            f"tools[{i}].function.parameters is not a JSON Schema: it must be an object, "
            f"not {quoted(parameters)}"
        )
    return Tool(name, parameters, function.get("strict") is True, tool)


_UNSCHEMATIC: Final = frozenset({"const", "enum", "default", "examples"})
"""Keywords whose values are data, where "$ref" is no reference."""
_NAMED_SCHEMAS: Final = frozenset(
    {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"}
)
"""Keywords whose values map arbitrary names to schemas."""


class ToolChoice(msgspec.Struct, frozen=True):
    """Choice of tools. mode: "auto" lets the model decide; "named" forces a call of `tool`."""

    mode: Literal["none", "auto", "required", "named"]
    tool: Tool | None = None


def read_tool_choice(choice: object, tools: Sequence[Tool]) -> ToolChoice:
    """Read "none", "auto", "required", {"type": "function", "function": {"name": ...}}, or None.

    None is "auto" if there are tools.

    Raises:
        InvalidRequestError: it is malformed, or names no tool of the request.
    """
    if choice is None:
        choice = "auto" if tools else "none"
    if choice in ("none", "auto"):
        return ToolChoice("auto" if tools and choice == "auto" else "none")
    names = ", ".join(repr(tool.name) for tool in tools) or "there are none"
    if choice == "required":
        if not tools:
            raise InvalidRequestError('tool_choice="required" needs tools: give at least one')
        return ToolChoice("required")
    if isinstance(choice, dict) and choice.get("type", "function") == "function":
        function = choice.get("function", choice)  # the Responses API has the name at the top level
        name = function.get("name") if isinstance(function, dict) else None
        for tool in tools:
            if tool.name == name:
                return ToolChoice("named", tool)
        if isinstance(name, str):
            raise InvalidRequestError(
                f"tool_choice names {quoted(name)}, which is not one of the tools: {names}"
            )
    raise InvalidRequestError(
        'tool_choice is "none", "auto", "required" or {"type": "function", "function": {"name": '
        f"str}}}}, not {quoted(choice)}"
    )


def arguments_schema(tool: Tool) -> dict[str, Any]:
    """Return the schema of a call's arguments, with "type": "object" even if the tool omits it."""
    return {"type": "object", **tool.parameters}


def loosened(tools: Sequence[Tool]) -> list[Tool]:
    """Return the tools, with arguments of non-strict tools loosened to any object."""
    return [tool if tool.strict else replace(tool, parameters={}) for tool in tools]


def with_equal_schemas(tools: Sequence[Tool]) -> dict[int, list[Tool]]:
    """Group tools with the same arguments and strictness, by the index of the first one."""
    first: dict[tuple[str, bool], int] = {}
    groups: dict[int, list[Tool]] = {}
    for i, tool in enumerate(tools):
        number = first.setdefault((repr(tool.parameters), tool.strict), i)
        groups.setdefault(number, []).append(tool)
    return groups


def calls_schema(tools: Sequence[Tool], parallel: bool) -> dict[str, Any]:
    """Return the schema of [{"name": ..., "parameters": {...}}, ...]. parallel: allows several
    calls."""
    call = call_schema(tools, "parameters")
    most = {} if parallel else {"maxItems": 1}
    return {"type": "array", "minItems": 1, **most, "items": call, "$defs": call.pop("$defs")}


def call_schema(tools: Sequence[Tool], key: str) -> dict[str, Any]:
    """Return the schema of a call, {"name": ..., key: {...}}.

    References start at a schema's root, which is moved to "/$defs/N", N being the index of the
    first tool in `with_equal_schemas`: names may be long.
    """
    groups = with_equal_schemas(tools)
    calls = [
        {
            "type": "object",
            "properties": {
                "name": {"enum": [tool.name for tool in group]},
                key: {"$ref": f"#/$defs/{number}"},
            },
            "required": ["name", key],
            "additionalProperties": False,
        }
        for number, group in groups.items()
    ]
    schemas = {
        str(number): _moved(arguments_schema(group[0]), f"#/$defs/{number}")
        for number, group in groups.items()
    }
    return {"anyOf": calls, "$defs": schemas}


def _moved(schema: Any, root: str, name: str | None = None) -> Any:
    """Return the schema with references to its own parts moved to the root.

    name: its `$id`, which two tools may share: it is removed, and references by it are moved, too.
    A part with its own `$id` remains the root of its references.
    """
    if isinstance(schema, list):
        return [_moved(item, root, name) for item in schema]
    if not isinstance(schema, dict):
        return schema
    if isinstance(schema.get("$id"), str):
        if name is not None:
            return schema
        name = schema["$id"].removesuffix("#")
        schema = {key: value for key, value in schema.items() if key != "$id"}
    name = name or ""
    moved: dict[str, Any] = {}
    for key, value in schema.items():
        if key == "$ref" and isinstance(value, str):
            own = value.removeprefix(name)
            is_own = own in ("", "#") or own.startswith("#/")
            moved[key] = f"{root}{own[1:]}" if is_own else value
        elif key in _NAMED_SCHEMAS and isinstance(value, dict):
            moved[key] = {one: _moved(part, root, name) for one, part in value.items()}
        else:
            moved[key] = value if key in _UNSCHEMATIC else _moved(value, root, name)
    return moved
