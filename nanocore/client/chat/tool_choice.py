"""Which tools an answer may call, or must: OpenAI's `tool_choice`, read and made a schema."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Literal

import msgspec
from msgspec.structs import replace

from nanocore.client.chat.tools import Tool
from nanocore.protocol.errors import InvalidRequestError, quoted

_UNSCHEMATIC: Final = frozenset({"const", "enum", "default", "examples"})
"""Keywords whose values are data, where "$ref" refers to nothing."""
_NAMED_SCHEMAS: Final = frozenset(
    {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"}
)
"""Keywords whose values are schemas by name, whatever the names are."""


class ToolChoice(msgspec.Struct, frozen=True):
    """mode: "auto" leaves it to the model; with "named" it calls the tool, and it alone."""

    mode: Literal["none", "auto", "required", "named"]
    tool: Tool | None = None


def read_tool_choice(choice: object, tools: Sequence[Tool]) -> ToolChoice:
    """Of "none", "auto", "required", {"type": "function", "function": {"name": ...}}, or None.

    None is "auto" if there are tools.

    Raises:
        InvalidRequestError: it is none of these, or names no tool of the request.
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
        function = choice.get("function", choice)  # the Responses API has the name outside
        name = function.get("name") if isinstance(function, dict) else None
        for tool in tools:
            if tool.name == name:
                return ToolChoice("named", tool)
        if isinstance(name, str):
            raise InvalidRequestError(
                f"tool_choice names {quoted(name)}, which is none of the tools: {names}"
            )
    raise InvalidRequestError(
        'tool_choice is "none", "auto", "required" or {"type": "function", "function": {"name": '
        f"str}}}}, not {quoted(choice)}"
    )


def arguments_schema(tool: Tool) -> dict[str, Any]:
    """What a call's arguments are: an object, even if the tool's schema does not say so."""
    return {"type": "object", **tool.parameters}


def loosened(tools: Sequence[Tool]) -> list[Tool]:
    """The tools; arguments of those that are not strict are any object."""
    return [tool if tool.strict else replace(tool, parameters={}) for tool in tools]


def with_equal_schemas(tools: Sequence[Tool]) -> dict[int, list[Tool]]:
    """Tools whose arguments are the same, and as strict, by the number of the first of them."""
    first: dict[tuple[str, bool], int] = {}
    groups: dict[int, list[Tool]] = {}
    for i, tool in enumerate(tools):
        number = first.setdefault((repr(tool.parameters), tool.strict), i)
        groups.setdefault(number, []).append(tool)
    return groups


def calls_schema(tools: Sequence[Tool], parallel: bool) -> dict[str, Any]:
    """An array of calls, [{"name": ..., "parameters": {...}}, ...]; parallel: of more than one."""
    call = call_schema(tools, "parameters")
    most = {} if parallel else {"maxItems": 1}
    return {"type": "array", "minItems": 1, **most, "items": call, "$defs": call.pop("$defs")}


def call_schema(tools: Sequence[Tool], key: str) -> dict[str, Any]:
    """A call, {"name": ..., key: {...}}.

    A schema's references begin at its root, which is moved to "/$defs/" and the number of the first
    tool of `with_equal_schemas`: names may be long.
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
    """The schema with references to its own parts beginning at the root.

    name: its `$id`, which two tools may share: it goes, and references by it are moved, too. A part
    with an `$id` of its own is the root of what it refers to, wherever it is.
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
