"""TemplateDialect: adapts a conversation to what the model's chat template accepts.

Templates differ in whether they accept content in parts, arguments of tool calls as objects or as
JSON text, the role "developer", a late system message, and tools. Each is detected by rendering a
small conversation, once, when a conversation first needs it.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, Final

from nanocore.client.chat.chat_messages import ROLES
from nanocore.protocol.errors import InvalidRequestError, quoted

_PROBE: Final = "probe 'text'"
_PROBE_ROLE: Final = "bystander"
_PROBE_TOOL: Final = {
    "type": "function",
    "function": {
        "name": "probe_tool",
        "description": "probe",
        "parameters": {"type": "object", "properties": {"a": {"type": "string"}}, "required": []},
    },
}
_TEXT_PARTS: Final = ("text", "input_text", "output_text", "refusal")
Render = Callable[..., str]
"""(messages) to a prompt; with `tools`, of a request that has them."""
logger = logging.getLogger(__name__)


class TemplateDialect:
    """Dialect of one template: the forms of messages that it accepts.

    render: renders a conversation with the template. source: the template's.
    """

    def __init__(self, render: Render, source: str = "") -> None:
        self._render = render
        self._source = source

    def adapt(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Return the messages in a form that the template accepts; the caller's are not changed.

        Raises:
            InvalidRequestError: a message is not a dict, or a part of its content is not text.
        """
        if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
            raise InvalidRequestError(
                f"a conversation is a list of messages, not {type(messages).__name__}"
            )
        turns = [self._adapted(i, message) for i, message in enumerate(messages)]
        roles = [turn["role"] for turn in turns]
        first = next((i for i, role in enumerate(roles) if role != "system"), len(roles))
        if "system" in roles[first:] and not self._takes_late_system:
            return [*turns[:first], *_as_users(turns[first:])]
        return turns

    @cached_property
    def omits_tools(self) -> bool:
        """Whether the template does not show tools to the model."""
        text = self._try([{"role": "user", "content": "hi"}], tools=[_PROBE_TOOL])
        if text is None or "probe_tool" in text:  # rendering fails with the template's own error
            return False
        logger.info("the chat template leaves tools out: the model does not see them")
        return True

    @property
    def mentions_tools(self) -> bool:
        """Whether the template's source has the variable `tools`."""
        return re.search(r"\btools\b", self._source) is not None

    def _adapted(self, i: int, message: object) -> dict[str, Any]:
        if not isinstance(message, Mapping):
            raise InvalidRequestError(
                f"messages[{i}] is a dict with a role, not {type(message).__name__}"
            )
        if not isinstance(message.get("role"), str) or not message["role"]:
            raise InvalidRequestError(
                f"messages[{i}] has no role: it is one of {', '.join(ROLES)}, not "
                f"{quoted(message.get('role'))}",
                f"messages[{i}].role",
            )
        turn = dict(message)
        if turn["role"] == "developer" and not self._knows_developer:
            turn["role"] = "system"
        content = self._content(i, message)
        calls = _calls(i, turn.pop("tool_calls", None))
        if not calls:  # clients send empty lists, which templates take for calls
            # Reasoning alone, a call without content: many templates concatenate content.
            turn["content"] = "" if content is None else content
        else:
            as_objects, needs_content = self._calls_form or (True, True)
            turn["tool_calls"] = [_call(call, as_objects) for call in calls]
            if content is not None or needs_content:
                turn["content"] = "" if content is None else content
        return turn

    def _content(self, i: int, message: Mapping[str, Any]) -> Any:
        content = message.get("content")
        if content is None and isinstance(message.get("refusal"), str):
            return message["refusal"]
        if isinstance(content, str | None):
            return content
        if not isinstance(content, (list, tuple)):
            raise InvalidRequestError(
                f"messages[{i}].content is a text or a list of parts, not {quoted(content)}",
                f"messages[{i}].content",
            )
        texts = [_text_of(i, k, part) for k, part in enumerate(content)]
        if self._takes_parts:
            return [{"type": "text", "text": text} for text in texts]
        return "\n".join(texts)

    @cached_property
    def _takes_parts(self) -> bool:
        text = self._try([{"role": "user", "content": [{"type": "text", "text": _PROBE}]}])
        return text is not None and _PROBE in text and "'type'" not in text and '"type"' not in text

    @cached_property
    def _knows_developer(self) -> bool:
        # A template that prints any role must not be taken for one that knows this role.
        user = {"role": "user", "content": "hi"}
        text, other = (
            self._try([{"role": role, "content": _PROBE}, user])
            for role in ("developer", _PROBE_ROLE)
        )
        if text is None or _PROBE not in text:
            return False
        return other is None or text.replace("developer", _PROBE_ROLE) != other

    @cached_property
    def _takes_late_system(self) -> bool:
        text = self._try([{"role": "user", "content": "hi"}, {"role": "system", "content": _PROBE}])
        return text is not None and _PROBE in text

    @cached_property
    def _calls_form(self) -> tuple[bool, bool] | None:
        """Return (arguments are objects and not JSON text, content may not be missing).

        None: the template does not show calls.
        """
        for needs_content in (False, True):
            for as_objects in (True, False):
                text = self._try(_calling(as_objects, needs_content))
                # Objects may be in the model's own form, but a Python repr means text was expected.
                if text is not None and "probe" in text and "'probe'" not in text:
                    return as_objects, needs_content
        return None

    def _try(self, messages: list[dict[str, Any]], **more: Any) -> str | None:
        try:
            return self._render(messages, **more)
        except InvalidRequestError:
            return None


def _as_users(turns: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Turn system messages into the user's, joined with the user's turns around them."""
    said: list[dict[str, Any]] = []
    was_system = False
    for turn in turns:
        is_system = turn["role"] == "system"
        user = {**turn, "role": "user"} if is_system else turn
        last = said[-1] if said else {}
        if (is_system or was_system) and last.get("role") == user["role"] == "user":
            said[-1] = {**last, "content": _joined(last.get("content"), user.get("content"))}
        else:
            said.append(user)
        was_system = is_system
    return said


def _joined(first: Any, second: Any) -> Any:
    if isinstance(first, str) and isinstance(second, str):
        return f"{first}\n\n{second}"
    both = [
        [{"type": "text", "text": content}] if isinstance(content, str) else content or []
        for content in (first, second)
    ]
    return [*both[0], *both[1]]


def _calling(as_objects: bool, has_content: bool) -> list[dict[str, Any]]:
    arguments: Any = {"probe": [1]}
    function = {"name": "f", "arguments": arguments if as_objects else json.dumps(arguments)}
    call = {"id": "call12345", "type": "function", "function": function}
    turn = {"role": "assistant", "tool_calls": [call]} | ({"content": ""} if has_content else {})
    result = {"role": "tool", "tool_call_id": "call12345", "name": "f", "content": "1"}
    return [{"role": "user", "content": "hi"}, turn, result]


def _calls(i: int, calls: object) -> list[dict[str, Any]]:
    """Return the calls of a turn, missing arguments as empty; raises InvalidRequestError."""
    where = f"messages[{i}].tool_calls"
    if not isinstance(calls, list | tuple | None):
        raise _bad_call(where, "a list of calls", calls)
    checked = []
    for k, call in enumerate(calls or ()):
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(call, Mapping) or not isinstance(function, Mapping):
            raise _bad_call(f"{where}[{k}]", '{"function": {"name": str, "arguments": ...}}', call)
        if not isinstance(name := function.get("name"), str) or not name:
            raise _bad_call(f"{where}[{k}].function.name", "the name of a tool", name)
        arguments = function.get("arguments")
        if not isinstance(arguments, str | Mapping | None):
            raise _bad_call(f"{where}[{k}].function.arguments", "JSON text or an object", arguments)
        arguments = {} if arguments is None else arguments
        checked.append({**call, "function": {**function, "arguments": arguments}})
    return checked


def _bad_call(where: str, what: str, value: object) -> InvalidRequestError:
    return InvalidRequestError(f"{where} is {what}, not {quoted(value)}", where)


def _call(call: dict[str, Any], as_objects: bool) -> dict[str, Any]:
    function = call["function"]
    arguments = function["arguments"]
    if as_objects and isinstance(arguments, str):
        try:
            value = json.loads(arguments) if arguments.strip() else {}
        except (ValueError, RecursionError):
            return call  # a call that was cut off: pass it on unchanged
        arguments = value if isinstance(value, dict) else arguments
    elif not as_objects and isinstance(arguments, Mapping):
        try:
            arguments = json.dumps(arguments, ensure_ascii=False)
        except (TypeError, ValueError, RecursionError):
            return call  # refused later, like other values that are not plain
    return {**call, "function": {**function, "arguments": arguments}}


def _text_of(i: int, k: int, part: object) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, Mapping) and (kind := part.get("type")) in _TEXT_PARTS:
        text = part.get("refusal" if kind == "refusal" else "text")
        if isinstance(text, str):
            return text
    raise InvalidRequestError(
        f'messages[{i}].content[{k}] must be {{"type": "text", "text": str}}, not '
        f"{quoted(part)}: models here read only text",
        f"messages[{i}].content[{k}]",
    )
