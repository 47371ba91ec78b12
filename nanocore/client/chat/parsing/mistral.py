"""Mistral: [TOOL_CALLS] and a JSON array of calls, or NAME[CALL_ID]ID[ARGS]{...} for each."""

from __future__ import annotations

import re
import secrets
import string
from typing import ClassVar, Final

from nanocore.client.chat.parsing.marks import Marks
from nanocore.client.chat.parsing.reading import Steps
from nanocore.client.chat.parsing.tool_parser import ToolParser

_NAME: Final = re.compile(r"[A-Za-z0-9_.-]*")
_ID: Final = re.compile(r"[A-Za-z0-9]*")
_ID_CHARACTERS: Final = string.ascii_letters + string.digits
_ID_CHARS: Final = 9


class MistralParser(ToolParser):
    """Both forms, whatever the model's age; [CALL_ID]ID and [ARGS] may lack. Any name is taken.

    Ids are nine letters or digits, as these models' templates demand. In the array an id comes too
    late if the arguments precede it: those are streamed.
    """

    marks: ClassVar[tuple[str, ...]] = ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]")
    openers: ClassVar[Marks] = Marks(("[TOOL_CALLS]",))

    @staticmethod
    def default_id() -> str:
        """Nine letters or digits."""
        return "".join(secrets.choice(_ID_CHARACTERS) for _ in range(_ID_CHARS))

    def block(self, opener: str) -> Steps[None]:
        """An array, or one call."""
        yield from self.space()
        if (yield from self.accept("[")):
            yield from self.call_array()
            return
        name = yield from self.span(_NAME)
        call_id = None
        if name and (yield from self.accept("[CALL_ID]")):
            call_id = yield from self.span(_ID)
        is_marked = name and (yield from self.accept("[ARGS]"))
        yield from self.space()
        if name and (is_marked or (yield from self.sees("{"))):
            self.begin(name, call_id)
            yield from self.json_value(self.add)
