"""Harmony (gpt-oss): messages on channels, for reasoning, text and calls."""

from __future__ import annotations

import re
from typing import ClassVar, Final

from nanocore.client.chat.events import Reasoning, Text, ToolArguments
from nanocore.client.chat.parsing.stream_reader import Delta, Marks, Steps
from nanocore.client.chat.parsing.tool_parser import ToolParser

_HEADER: Final = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>")
_ENDS: Final = ("<|end|>", "<|call|>", "<|return|>")
_HEADER_MARKS: Final = Marks((*_HEADER, *_ENDS))
_BODY_ENDS: Final = Marks(("<|start|>", "<|channel|>", *_ENDS))
_RECIPIENT: Final = re.compile(r"\bto=(\S+)")


class HarmonyParser(ToolParser):
    """A header, <|message|>, and a body up to <|end|>, <|call|>, <|return|> or the next header.

    A message to a recipient is a call, on any channel; the recipient functions.NAME is reported as
    NAME. The analysis channel is reasoning, every other channel text. Messages of one kind are
    joined by a line break. Text without a header is text. A header without a body is dropped.
    """

    marks: ClassVar[tuple[str, ...]] = (*_HEADER, *_ENDS)

    def run(self) -> Steps[None]:
        """Read messages. The prompt ends within the header of the first one."""
        self._spoken: set[type] = set()
        while True:
            self.hold()
            yield from self.space()
            is_header = (yield from self.sees("to=", *self.marks)) is not None
            if not (yield from self.fill(1)):
                return
            space = "".join(self._held or ())
            self._held = None
            if is_header:
                yield from self.block("")
            else:
                self._join(Text)
                self.emit(Text, space)
                yield from self._body(Text, Text)

    def block(self, opener: str) -> Steps[None]:
        header = yield from self._header()
        if header is None:
            return
        recipient = _RECIPIENT.search(header["role"]) or _RECIPIENT.search(header["channel"])
        if recipient:
            self.begin(recipient[1].removeprefix("functions."))
            yield from self._body(ToolArguments)
            return
        kind = Reasoning if header["channel"].split()[:1] == ["analysis"] else Text
        is_empty = yield from self.sees("<|start|>", "<|channel|>", *_ENDS)
        if not is_empty and (yield from self.fill(1)):
            self._join(kind)
        yield from self._body(kind, kind)

    def _body(
        self, kind: type[Delta], quick: type[Text] | type[Reasoning] | None = None
    ) -> Steps[None]:
        mark = yield from self.before(_BODY_ENDS, lambda text: self.emit(kind, text), quick)
        if mark in _ENDS:
            yield from self.accept(mark)

    def _join(self, kind: type[Text] | type[Reasoning]) -> None:
        if kind in self._spoken:
            self.emit(kind, "\n")
        self._spoken.add(kind)

    def _header(self) -> Steps[dict[str, str] | None]:
        """Read the parts of a header by name; None if the text, or the message, ends."""
        part = "role"
        parts: dict[str, list[str]] = {"role": [], "channel": [], "constrain": []}
        while True:
            mark = yield from self.until(_HEADER_MARKS, parts[part].append)
            if mark == "<|message|>":
                return {name: "".join(pieces) for name, pieces in parts.items()}
            if mark is None or mark in _ENDS:
                return None
            if mark == "<|start|>":
                parts = {"role": [], "channel": [], "constrain": []}
            part = {"<|channel|>": "channel", "<|constrain|>": "constrain"}.get(mark, "role")
