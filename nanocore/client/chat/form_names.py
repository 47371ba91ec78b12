"""What callers call the parts of a form, so that errors and `not_held` name what they wrote."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

from nanocore.client.chat.tool_choice import ToolChoice
from nanocore.client.chat.tools import Tool
from nanocore.protocol.errors import InvalidRequestError, NanocoreError

_PART: Final = re.compile(
    r"structured_outputs\.(?:json|structural_tag\.structures\[0\]\.schema) at '/\$defs/(\d+)"
)
_WHOLE: Final = re.compile(r"structured_outputs(?:\.(?:json|structural_tag)\b|(?![\w.]))")


class FormNames(NamedTuple):
    """Names of a form, of the schemas in its "$defs", and of parts that were left out of it.

    whole: "" if the caller wrote structured_outputs. parts: by number.
    """

    whole: str = ""
    parts: Sequence[str] = ()
    left_out: Sequence[str] = ()

    @contextmanager
    def in_errors(self) -> Iterator[None]:
        """Let errors of the form speak of what the caller wrote."""
        try:
            yield
        except InvalidRequestError as error:
            self.rename(error)
            raise

    def rename(self, error: NanocoreError) -> None:
        """Let an error of the form speak of what the caller wrote."""
        text = self.named(str(error))
        if text != str(error):
            error.args = (text,)
            if isinstance(error, InvalidRequestError):
                error.param = self.whole.partition(":")[0]

    def not_held(self, pointers: Sequence[str]) -> list[str]:
        """Names of what is not held. pointers: of keywords in the schema that was sent."""
        places = [self.named(f"structured_outputs.json at '{pointer}") for pointer in pointers]
        return [*self.left_out, *(place.replace(" at '", "", 1) for place in places)]

    def named(self, text: str) -> str:
        """The text, with the caller's names in place of the engine's."""
        if self.parts:
            text = _PART.sub(lambda found: f"{self.parts[int(found[1])]} at '", text)
        return _WHOLE.sub(self.whole, text) if self.whole else text


def names_of_format(response_format: object) -> FormNames:
    """Of a response_format, by its type."""
    given: dict[str, Any] = response_format if isinstance(response_format, dict) else {}
    if given.get("type") not in ("json_schema", "json_object"):
        return FormNames("response_format")
    return FormNames(f"response_format{'.json_schema' * ('json_schema' in given)}.schema")


def names_of_calls(tools: Sequence[Tool], choice: ToolChoice) -> FormNames:
    """Of calls that match their tools' schemas."""
    parts = [f"tools[{tool.name}].parameters" for tool in tools]
    if choice.tool is not None:
        return FormNames(parts[tools.index(choice.tool)])
    return FormNames("tools: the schema of all calls", parts)
