"""The rows that PROTOCOL.md's field tables must have, out of the types and their JSON Schema.

A table's columns are field, type, range, default, since and meaning; all but the meaning follow
from the code. Where a range is written as `section N`, another table says it.
"""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import inspect

from nanocore.protocol.messages import (
    FROM_CLIENT,
    FROM_ENGINE,
    Draining,
    Error,
    Event,
    Limits,
    ModelCard,
    ModelFile,
    TokenLogprobs,
)
from nanocore.protocol.metrics import (
    CacheGroupStats,
    Metric,
    MetricSample,
    RecentSteps,
    RequestPhases,
    Stats,
    StepColumns,
)
from nanocore.protocol.sampling import (
    DefaultSampling,
    EngineSamplingParams,
    RepetitionDetectionParams,
)
from nanocore.protocol.structured_outputs import (
    ReasoningMarks,
    StructuralTag,
    Structure,
    StructuredOutputs,
)

Struct = type[msgspec.Struct]
HEADINGS: dict[str, Struct] = {
    **{f"### {message.op.name}": message for message in (*FROM_CLIENT, *FROM_ENGINE)},
    "#### Model card": ModelCard,
    "#### Model file": ModelFile,
    "#### Limits": Limits,
    "#### Event": Event,
    "#### Log probabilities": TokenLogprobs,
    "#### Stats": Stats,
    "#### Cache group": CacheGroupStats,
    "#### Metric": Metric,
    "#### Metric sample": MetricSample,
    "#### Recent steps": RecentSteps,
    "#### Step columns": StepColumns,
    "#### Request way": RequestPhases,
    "## 9. Sampling parameters": EngineSamplingParams,
    "### Repetition detection": RepetitionDetectionParams,
    "### Structured outputs": StructuredOutputs,
    "#### Reasoning": ReasoningMarks,
    "#### Structural tag": StructuralTag,
    "#### Structure": Structure,
}
"""Which struct the table under a heading describes."""
SAME_TABLE: dict[str, Struct] = {"## 9. Sampling parameters": DefaultSampling}
"""Structs with the same fields; they differ in what becomes of unknown ones."""
ELSEWHERE: dict[str | tuple[Struct, str], str] = {
    "sampling": "section 9",
    "default_sampling": "section 9",
    (Error, "code"): "section 12",
    (ModelFile, "name"): "one of those below",
}
"""Fields, of one struct or of all, whose range another table has, or the text below."""
FIRST_SINCE = {
    ModelFile: "1.3",
    TokenLogprobs: "1.5",
    **dict.fromkeys((StructuredOutputs, StructuralTag, Structure), "1.6"),
    ReasoningMarks: "1.7",
    Draining: "1.9",
    CacheGroupStats: "1.13",
    RepetitionDetectionParams: "1.14",
    **dict.fromkeys((Metric, MetricSample), "1.10"),
    **dict.fromkeys((RecentSteps, StepColumns, RequestPhases), "1.11"),
}


def expected_rows(struct: Struct) -> list[list[str]]:
    """[field, type, range, default, since] of each field, in order."""
    properties = schema_of(struct)["properties"]
    fields = {field.encode_name: field for field in msgspec.structs.fields(struct)}
    types = {field.encode_name: field.type for field in inspect.type_info(struct).fields}
    return [
        [
            name,
            _type_name(types[name]),
            ELSEWHERE.get((struct, name)) or ELSEWHERE.get(name) or range_of(properties[name]),
            _default(fields[name]),
            keywords(properties[name]).get("since", FIRST_SINCE.get(struct, "1.0")),
        ]
        for name in fields
    ]


def schema_of(struct: Struct) -> dict[str, Any]:
    """The struct's own JSON Schema, its references unresolved."""
    _, definitions = msgspec.json.schema_components([struct], ref_template="#/$defs/{name}")
    schema: dict[str, Any] = definitions[struct.__name__]
    return schema


def columns_of(struct: Struct) -> dict[str, str]:
    """The element type of each field that is a column: "int32", "uint32" or "float32"."""
    properties = schema_of(struct)["properties"]
    kinds = {name: keywords(schema).get("column") for name, schema in properties.items()}
    return {name: kind for name, kind in kinds.items() if kind}


def read_tables(document: str) -> dict[str, list[list[str]]]:
    """The table under each heading of `HEADINGS`."""
    return {heading: table_after(document, heading) for heading in HEADINGS}


def table_after(document: str, heading: str) -> list[list[str]]:
    """The cells of the first table under a heading, without its two head lines."""
    section = document.split(f"\n{heading}\n", 1)[1].split("\n#", 1)[0]
    table = section[section.index("\n|") + 1 :].split("\n\n", 1)[0]
    lines = table.splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def _type_name(info: inspect.Type) -> str:
    match info:
        case inspect.Metadata(type=inner):
            return _type_name(inner)
        case inspect.UnionType(types=types):
            return " or ".join(sorted(map(_type_name, types), key=lambda name: name == "nil"))
        case inspect.ListType(item_type=item) | inspect.CollectionType(item_type=item):
            return f"[{_type_name(item)}]"
        case inspect.TupleType(item_types=items):
            return f"[{', '.join(map(_type_name, items))}]"
        case inspect.StructType():
            return "map"
        case inspect.LiteralType():
            return "str"
    names = {
        inspect.IntType: "int",
        inspect.FloatType: "float",
        inspect.StrType: "str",
        inspect.BytesType: "bin",
        inspect.BoolType: "bool",
        inspect.NoneType: "nil",
    }
    return names[type(info)]


def keywords(schema: dict[str, Any]) -> dict[str, Any]:
    """What a property says of its values, nil aside."""
    inner = next((s for s in schema.get("anyOf", []) if s.get("type") != "null"), {})
    return inner | schema


def range_of(schema: dict[str, Any]) -> str:
    """What a property's values may be, as the tables say it; empty if all that its type has."""
    limits = keywords(schema)
    match limits:
        case {"column": kind}:
            return f"{kind} column" + (", at least one" if limits.get("minItems") else "")
        case {"enum": values}:
            return ", ".join(values)
        case {"pattern": pattern}:
            return f"{pattern.split('{')[1].split('}')[0]} hex digits"
        case {"minLength": low, "maxLength": high}:
            return f"{low} to {high} characters"
        case {"minItems": low, "maxItems": high} if "prefixItems" not in limits:
            return f"{low} to {high} items"
        case {"maxItems": high} if "prefixItems" not in limits:
            return f"at most {high}"
        case {"exclusiveMinimum": low, "maximum": high}:
            return f"({_number(low)}, {_number(high)}]"
        case {"minimum": low, "maximum": high}:
            return f"{_number(low)} to {_number(high)}"
        case {"minimum": low, "exclusiveMaximum": high}:
            return f"{_number(low)} to {_number(high - 1)}"
        case {"minimum": low}:
            return f"≥ {_number(low)}"
    return ""


def _number(value: float) -> str:
    """Large powers of two, and what is one below them, as such; no fraction that is none."""
    value = int(value) if value == int(value) else value
    for number, suffix in ((value, ""), (value + 1, " - 1")):
        size = abs(number)
        if size > 1 << 16 and size & (size - 1) == 0:
            return f"{'-' if number < 0 else ''}2^{size.bit_length() - 1}{suffix}"
    return str(value)


def _default(field: msgspec.structs.FieldInfo) -> str:
    if field.required:
        return "required"
    value = field.default
    if value is msgspec.NODEFAULT:
        assert field.default_factory is not msgspec.NODEFAULT
        value = field.default_factory()
    if value == b"":
        return "empty"
    if isinstance(value, msgspec.Struct):
        return "{}"
    return "nil" if value is None else msgspec.json.encode(value).decode()
