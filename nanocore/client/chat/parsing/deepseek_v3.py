"""DeepSeek V3, R1 and V3.1: calls between special tokens of its own."""

from __future__ import annotations

import re
from typing import ClassVar, Final

from nanocore.client.chat.parsing.marks import Marks
from nanocore.client.chat.parsing.reading import Steps
from nanocore.client.chat.parsing.tool_parser import ToolParser


def _mark(words: str) -> str:
    """The special token of these words: with a wide bar, and a block for each space."""
    return f"<\uff5c{words}\uff5c>".replace(" ", "\u2581")


_CALLS_BEGIN: Final = _mark("tool calls begin")
_CALLS_END: Final = _mark("tool calls end")
_CALL_BEGIN: Final = _mark("tool call begin")
_CALL_END: Final = _mark("tool call end")
_SEPARATOR: Final = _mark("tool sep")
_HEAD_ENDS: Final = Marks((_SEPARATOR, _CALL_END, _CALLS_END))
_LINE: Final = re.compile(r"[^\n`{<]*")


class DeepseekV3Parser(ToolParser):
    """A call is function, separator, the name's line and fenced JSON (V3, R1), or name, separator
    and JSON (V3.1). Any name is taken."""

    marks: ClassVar[tuple[str, ...]] = (
        _CALLS_BEGIN, _CALLS_END, _CALL_BEGIN, _CALL_END, _SEPARATOR
    )  # fmt: skip
    openers: ClassVar[Marks] = Marks((_CALLS_BEGIN,))
    closer: ClassVar[str] = _CALL_END

    def block(self, opener: str) -> Steps[None]:
        """Calls up to the mark of their end."""
        while (yield from self._call()):
            yield from self.space()
            if (yield from self.accept(_CALLS_END)):
                return
            self.hold()

    def _call(self) -> Steps[bool]:
        yield from self.space()
        if not (yield from self.accept(_CALL_BEGIN)):
            return False
        head: list[str] = []
        yield from self.before(_HEAD_ENDS, head.append)
        if not (yield from self.accept(_SEPARATOR)):
            return False
        yield from self.space()
        name = "".join(head)
        if not (yield from self.sees("{")):
            name = yield from self.span(_LINE)
            yield from self.space()
            yield from self.accept("```json", "```")
            yield from self.space()
        if not name.strip() or not (yield from self.sees("{")):
            return False
        self.begin(name.strip())
        yield from self.json_value(self.add)
        yield from self.space()
        yield from self.accept("```")
        yield from self.space()
        yield from self.accept(_CALL_END)
        return True
