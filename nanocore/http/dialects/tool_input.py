"""A call's arguments as Anthropic has them: an object, whatever the model has written.

What is none, because the model erred or was cut off, is shown whole: {"INVALID_JSON": the text},
the form in which Anthropic's own documents have clients hand such a thing back to a model.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

_KEY: Final = "INVALID_JSON"


def tool_input(arguments: str) -> msgspec.Raw | dict[str, Any]:
    """The object, digit for digit as the model wrote it. No arguments are an empty one."""
    if not arguments.strip():
        return {}
    try:
        if isinstance(msgspec.json.decode(arguments), dict):
            return msgspec.Raw(arguments.strip().encode())
    except (msgspec.DecodeError, RecursionError):
        pass
    return {_KEY: arguments}


class StreamedInput:
    """The same, while it comes. What begins as an object passes through at once, to its end."""

    def __init__(self) -> None:
        self._held: list[str] = []
        self._is_object: bool | None = None  # until something but spaces has come

    def feed(self, delta: str) -> str:
        """What of it can be shown now."""
        if self._is_object:
            return delta
        self._held.append(delta)
        if self._is_object is None and (begin := delta.lstrip()):
            self._is_object = begin.startswith("{")
            if self._is_object:
                return "".join(self._held)
        return ""

    def finish(self) -> str:
        """What was held back."""
        if self._is_object is not False:
            return ""
        return msgspec.json.encode({_KEY: "".join(self._held)}).decode()
