"""Reasoning between tags at the beginning of a text, and what parses the rest."""

from __future__ import annotations

from typing import ClassVar, Final

from nanocore.client.chat.events import Reasoning, Text
from nanocore.client.chat.parsing.stream_reader import (
    Marks,
    OutputParser,
    ParsedEvent,
    Steps,
    StreamReader,
)

DEEPSEEK_TURN: Final = "<\uff5cAssistant\uff5c>"
_LINE_BREAKS: Final = "\n\r"
_TURNS: Final = ("<|", "<\uff5c", "[/INST]", "<start_of_turn>", "<end_of_turn>", "</s>")
"""Beginnings of turn marks in chat templates."""


class PlainTextParser:
    """Parser of formats without tools and reasoning: all is text."""

    def __init__(self, index: int = 0) -> None:
        self._index = index

    def feed(self, delta: str) -> list[ParsedEvent]:
        return [Text(delta, self._index)] if delta else []

    def finish(self) -> list[ParsedEvent]:
        return []


class ThinkParser(StreamReader):
    """<think>, reasoning, </think>, and the rest, which `inner` parses. For Qwen3, DeepSeek-R1.

    The text may begin with <think>, after white space, or within the reasoning if the prompt opened
    it (in_reasoning; the tag may then occur again). Otherwise the inner parser reads everything,
    tags included, and a later </think> is text. Within the reasoning other marks are text. Without
    a closing tag everything is reasoning. Line breaks around the reasoning and before the rest are
    dropped.
    """

    marks: ClassVar[tuple[str, ...]] = ("<think>", "</think>")

    def __init__(self, inner: OutputParser, in_reasoning: bool = False, index: int = 0) -> None:
        super().__init__(index)
        self._inner = inner
        self._in_reasoning = in_reasoning
        self._is_over = False

    def feed(self, delta: str) -> list[ParsedEvent]:
        return self._inner.feed(delta) if self._is_over else super().feed(delta)

    def finish(self) -> list[ParsedEvent]:
        events = [] if self._is_over else super().finish()
        return events + self._inner.finish()

    def run(self) -> Steps[None]:
        begin, end = self.marks
        self._held = []
        yield from self.space()
        if (yield from self.accept(begin)) or self._in_reasoning:
            rest = "" if self._held and begin in self._held else "".join(self._held).lstrip("\n\r")
            self._held = None
            if not rest:
                yield from self._line_breaks()
            self._think(rest)
            yield from self.until(Marks((end,)), self._think, Reasoning)
            yield from self._line_breaks()
        rest = "".join(self._held or ()) + self.take(len(self._text))
        self._is_over = True
        self._held = None
        self.flush()
        if rest:
            self._out += self._inner.feed(rest)

    def _line_breaks(self) -> Steps[None]:
        while (yield from self.accept("\n", "\r")):
            pass

    def _think(self, text: str) -> None:
        self.emit(Reasoning, self.without_trailing(text, _LINE_BREAKS))


class MistralThinkParser(ThinkParser):
    """ThinkParser with Mistral's tags."""

    marks: ClassVar[tuple[str, ...]] = ("[THINK]", "[/THINK]")


class SeedOssThinkParser(ThinkParser):
    """ThinkParser with Seed-OSS's tags."""

    marks: ClassVar[tuple[str, ...]] = ("<seed:think>", "</seed:think>")


_ALL: Final = (ThinkParser, MistralThinkParser, SeedOssThinkParser)
OPENING_MARKS: Final = tuple(parser.marks[0] for parser in _ALL)


def prompt_opens_reasoning(prompt_text: str) -> bool:
    """Whether the response to this rendered prompt begins within the reasoning.

    It does if a tag in the prompt opens it, none closes it, and no turn begins in between: users
    may write about tags, too.
    """
    for begin, end in (parser.marks for parser in _ALL):
        start = prompt_text.rfind(begin)
        after = prompt_text[start + len(begin) :]
        if start >= 0 and not any(mark in after for mark in (end, *_TURNS)):
            return True
    return False
