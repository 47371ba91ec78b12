"""Hermes, Qwen2.5, Qwen3: <tool_call>{"name": ..., "arguments": {...}}</tool_call>."""

from __future__ import annotations

import re
from typing import ClassVar, Final

from nanocore.client.chat.parsing.marks import Marks
from nanocore.client.chat.parsing.reading import Steps
from nanocore.client.chat.parsing.tool_parser import ToolParser

_SURPLUS: Final = re.compile(r"[}\]\s]*")


class HermesParser(ToolParser):
    """Any name is taken. Surplus brackets after a call are dropped, and its end mark may lack."""

    marks: ClassVar[tuple[str, ...]] = ("<tool_call>", "</tool_call>")
    openers: ClassVar[Marks] = Marks(("<tool_call>",))
    closer: ClassVar[str] = "</tool_call>"

    def block(self, opener: str) -> Steps[None]:
        """One call."""
        if (yield from self.call_object()):
            yield from self.span(_SURPLUS)
            yield from self.accept(self.closer)
