"""What a parser made of a text, in the few words that tests compare."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

from nanocore.client.chat.events import Reasoning, Text, ToolArguments, ToolBegin
from nanocore.client.chat.parsing.formats import Formats, wrap_in_reasoning
from nanocore.client.chat.parsing.reasoning import PlainTextParser
from nanocore.client.chat.parsing.stream_reader import OutputParser, ParsedEvent
from nanocore.client.chat.parsing.tool_parser import NewId
from nanocore.client.chat.tools import Tool, read_tools

Joined = list[tuple[str, ...]]
"""("text", ...), ("reasoning", ...) and ("call", name, arguments), in order."""

TYPES = {
    "city": {"type": "string"},
    "days": {"type": "integer"},
    "exact": {"type": "boolean"},
    "scale": {"type": "number"},
    "filter": {"type": "object"},
    "tags": {"type": "array"},
    "unit": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    "limit": {"type": ["integer", "null"]},
    "place": {"$ref": "#/$defs/Place"},
    "level": {"enum": [1, 2, None]},
    "mode": {"const": 5},
    "size": {"enum": ["1", "2"]},
}
TOOLS: list[Tool] = read_tools(
    [
        {"type": "function", "function": {"name": name, "parameters": parameters}}
        for name, parameters in (
            (
                "get_weather",
                {"type": "object", "properties": TYPES, "$defs": {"Place": {"type": "object"}}},
            ),
            ("search", {"type": "object", "properties": {"query": {"type": "string"}}}),
            ("now", None),
        )
    ]
)


def make_parser(
    formats: Formats,
    tools: Sequence[Tool],
    *,
    in_reasoning: bool = False,
    index: int = 0,
    new_id: NewId | None = None,
) -> OutputParser:
    """The parser of a sample's text, as a chat request makes it if no call is forced."""
    inner: OutputParser = PlainTextParser(index)
    if formats.tool_parser is not None and tools:
        inner = formats.tool_parser(tools, index, new_id)
    return wrap_in_reasoning(formats, inner, in_reasoning=in_reasoning, index=index)


def parser_of(tools: str | None, reasoning: str | None = None, **options: bool) -> OutputParser:
    """A parser for TOOLS, with ids c0, c1, ..."""
    ids = itertools.count()
    return make_parser(Formats(tools, reasoning), TOOLS, new_id=lambda: f"c{next(ids)}", **options)


def events_of(parser: OutputParser, pieces: Iterable[str]) -> list[ParsedEvent]:
    events = [event for piece in pieces for event in parser.feed(piece)]
    return events + parser.finish()


def joined(events: Iterable[ParsedEvent]) -> Joined:
    """Neighbours of one kind joined. Every delta is checked not to be empty, every call's number
    to be its place."""
    said: list[tuple[list[str], list[str]]] = []
    num_calls = 0
    for event in events:
        if isinstance(event, ToolBegin):
            assert event.tool_index == num_calls
            num_calls += 1
            said.append((["call", event.name], []))
            continue
        assert event.delta
        if isinstance(event, ToolArguments):
            assert event.tool_index == num_calls - 1
            assert said[-1][0][0] == "call"
            said[-1][1].append(event.delta)
            continue
        kind = {Text: "text", Reasoning: "reasoning"}[type(event)]
        if not said or said[-1][0] != [kind]:
            said.append(([kind], []))
        said[-1][1].append(event.delta)
    return [(*head, "".join(deltas)) for head, deltas in said]
