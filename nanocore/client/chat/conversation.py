"""A conversation as clients send it, made what the model's template takes.

Templates differ in what they know: text in parts, tool calls' arguments as objects or as JSON text,
the role "developer", a system that speaks late, turns without content. What one knows is found out
by rendering a small conversation, once, and only if a conversation holds such a thing.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, Final

from nanocore.protocol.errors import InvalidRequestError, quoted

_PROBE: Final = "probe 'text'"
_TEXT_PARTS: Final = ("text", "input_text", "output_text", "refusal")
Render = Callable[[list[dict[str, Any]]], str]


class TemplateDialect:
    """What one template takes. render: a conversation to a prompt, by that template."""

    def __init__(self, render: Render) -> None:
        self._render = render

    def adapt(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """The messages as the template takes them; those of the caller stay as they are.

        Raises:
            InvalidRequestError: a message is no dict, or a part of its content is no text.
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

    def _adapted(self, i: int, message: object) -> dict[str, Any]:
        if not isinstance(message, Mapping):
            raise InvalidRequestError(
                f"messages[{i}] is a dict with a role, not {type(message).__name__}"
            )
        if not isinstance(message.get("role"), str) or not message["role"]:
            raise InvalidRequestError(
                f'messages[{i}] has no role: it is "system", "developer", "user", "assistant" or '
                f'"tool", not {quoted(message.get("role"))}'
            )
        turn = dict(message)
        if turn.get("role") == "developer" and not self._knows_developer:
            turn["role"] = "system"
        content = turn.get("content")
        if content is None and isinstance(turn.get("refusal"), str):
            content = turn["content"] = turn["refusal"]
        if isinstance(content, (list, tuple)):
            texts = [_text_of(i, k, part) for k, part in enumerate(content)]
            if self._takes_parts:
                turn["content"] = [{"type": "text", "text": text} for text in texts]
            else:
                turn["content"] = "\n".join(texts)
        calls = turn.get("tool_calls")
        if isinstance(calls, (list, tuple)) and calls:
            as_objects, needs_content = self._calls_form
            turn["tool_calls"] = [_call(call, as_objects) for call in calls]
            if needs_content and content is None:
                turn["content"] = ""
            return turn
        if "tool_calls" in turn and not calls:
            del turn["tool_calls"]  # clients send empty lists; templates take them for calls
        if content is None:  # thoughts alone, a tool without a result: many templates add content
            turn["content"] = ""
        return turn

    @cached_property
    def _takes_parts(self) -> bool:
        """Whether it shows text in parts, and not the list of them."""
        text = self._try([{"role": "user", "content": [{"type": "text", "text": _PROBE}]}])
        return text is not None and _PROBE in text and "'type'" not in text and '"type"' not in text

    @cached_property
    def _knows_developer(self) -> bool:
        user = {"role": "user", "content": "hi"}
        text = self._try([{"role": "developer", "content": _PROBE}, user])
        return text is not None and _PROBE in text

    @cached_property
    def _takes_late_system(self) -> bool:
        """Whether the system may speak after others, as it does in agents' conversations."""
        text = self._try([{"role": "user", "content": "hi"}, {"role": "system", "content": _PROBE}])
        return text is not None and _PROBE in text

    @cached_property
    def _calls_form(self) -> tuple[bool, bool]:
        """(arguments are objects and not JSON text, content may not be missing)"""
        for needs_content in (False, True):
            for as_objects in (True, False):
                text = self._try(_calling(as_objects, needs_content))
                # Objects may be written in a form of the model's own, but not in Python's.
                if text is not None and "probe" in text and "'probe'" not in text:
                    return as_objects, needs_content
        # It shows no calls, or none like this: then its error says why.
        return True, self._try(_calling(True, False)) is None

    def _try(self, messages: list[dict[str, Any]]) -> str | None:
        try:
            return self._render(messages)
        except InvalidRequestError:
            return None


def _as_users(turns: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The system's turns as the user's, each one with those of the user around it."""
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
    """Contents, one after the other: texts, or lists of parts."""
    if isinstance(first, str) and isinstance(second, str):
        return f"{first}\n\n{second}"
    both = [
        [{"type": "text", "text": content}] if isinstance(content, str) else content or []
        for content in (first, second)
    ]
    return [*both[0], *both[1]]


def _calling(as_objects: bool, has_content: bool) -> list[dict[str, Any]]:
    """A conversation with a tool call in it."""
    arguments: Any = {"probe": [1]}
    function = {"name": "f", "arguments": arguments if as_objects else json.dumps(arguments)}
    call = {"id": "call12345", "type": "function", "function": function}
    turn = {"role": "assistant", "tool_calls": [call]} | ({"content": ""} if has_content else {})
    result = {"role": "tool", "tool_call_id": "call12345", "name": "f", "content": "1"}
    return [{"role": "user", "content": "hi"}, turn, result]


def _call(call: Any, as_objects: bool) -> Any:
    """A tool call with its arguments in the other form, where they can be."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or "arguments" not in function:
        return call
    arguments = function["arguments"]
    if as_objects and isinstance(arguments, str):
        try:
            value = json.loads(arguments) if arguments.strip() else {}
        except (ValueError, RecursionError):
            return call  # a call that was cut off: as the model wrote it
        arguments = value if isinstance(value, dict) else arguments
    elif not as_objects and isinstance(arguments, Mapping):
        try:
            arguments = json.dumps(arguments, ensure_ascii=False)
        except (TypeError, ValueError, RecursionError):
            return call  # refused with all else that is not plain
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
        f"{quoted(part)}: models here read text alone"
    )
