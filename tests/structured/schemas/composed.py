"""Schemas put together by a seeded generator, of fields that people name and type so.

Each is an object of some fields, wrapped as payloads are: alone, in a list, in a page, in a union
with an error, under $defs, as a tree. The seed is in the code, so they are the same everywhere.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from tests.structured.schemas.notation import (
    YES_OR_NO,
    Schema,
    either,
    integer,
    many,
    maybe,
    number,
    one_of,
    record,
    ref,
    text,
)

NUM_SCHEMAS = 96


def named(value: Schema) -> Schema:
    """An object of any short names."""
    return {
        "type": "object",
        "patternProperties": {"^[a-z_]{1,8}$": value},
        "additionalProperties": False,
        "maxProperties": 3,
    }


FIELDS: dict[str, Schema] = {
    "id": integer(1, 10**6),
    "uuid": text(format="uuid"),
    "name": text(20, 1),
    "title": text(30, 1),
    "description": text(40),
    "created_at": text(format="date-time"),
    "birthday": text(format="date"),
    "status": one_of("new", "open", "closed"),
    "priority": one_of("low", "medium", "high", "urgent"),
    "tags": many(text(8, 1), 0, 3),
    "scores": many(number(0, 1), 1, 3),
    "count": integer(0, 1000),
    "ratio": number(0, 1),
    "price": number(0, 9999.99),
    "temperature": number(-273.15, 1000),
    "enabled": YES_OR_NO,
    "parent_id": maybe(integer(1, 10**6)),
    "comment": maybe(text(30)),
    "zip": text(pattern="^[0-9]{5}(-[0-9]{4})?$"),
    "color": text(pattern="^#[0-9a-f]{6}$"),
    "version": text(pattern=r"^v?[0-9]{1,2}\.[0-9]{1,2}\.[0-9]{1,2}$"),
    "locale": one_of("en-US", "de-DE", "fr-FR", "ja-JP"),
    "ip": text(format="ipv4"),
    "position": record({"x": number(-100, 100), "y": number(-100, 100)}),
    "owner": record({"id": integer(1, 999), "name?": text(15, 1)}),
    "value": either(text(15), number(-1000, 1000), YES_OR_NO, {"type": "null"}),
    "attributes": named(text(8)),
    "größe": number(0, 300),
    "名前": text(10, 1),
}


def draw_record(rng: random.Random, num_fields: int) -> Schema:
    """An object of so many fields, about a third of which may be left out."""
    names = rng.sample([*FIELDS], num_fields)
    optional = [name for name in names if rng.random() < 0.35]
    fields = {f"{name}?" if name in optional else name: FIELDS[name] for name in names}
    return record(fields, rest=rng.choice([False, False, False, None]))


def alone(rng: random.Random) -> Schema:
    return draw_record(rng, rng.randint(3, 6))


def listed(rng: random.Random) -> Schema:
    return many(draw_record(rng, rng.randint(2, 4)), 0, rng.randint(1, 3))


def paged(rng: random.Random) -> Schema:
    items = many(draw_record(rng, rng.randint(2, 3)), 0, 2)
    return record({"data": items, "total": integer(0, 9999), "next?": maybe(text(12))})


def nested(rng: random.Random) -> Schema:
    inner, outer = draw_record(rng, 2), draw_record(rng, 2)
    return record({"meta": outer, "body": record({"item": inner, "ok": YES_OR_NO})})


def united(rng: random.Random) -> Schema:
    kinds = rng.sample(["created", "updated", "deleted", "failed"], 3)
    return either(
        *(record({"type": {"const": kind}, "data": draw_record(rng, 2)}) for kind in kinds)
    )


def referred(rng: random.Random) -> Schema:
    defs = {"first": draw_record(rng, 2), "second": draw_record(rng, 2)}
    fields: dict[str, Schema] = {
        "a": ref("first"),
        "b?": ref("second"),
        "c": many(ref("first"), 0, 2),
    }
    return {"$defs": defs, **record(fields)}


def tree(rng: random.Random) -> Schema:
    name, other = rng.sample(
        ["id", "name", "status", "count", "enabled", "color", "title", "value"], 2
    )
    fields = {
        name: FIELDS[name],
        f"{other}?": FIELDS[other],
        "children?": many(ref("node"), 0, rng.randint(1, 2)),
    }
    return {"$defs": {"node": record(fields)}, "$ref": "#/$defs/node"}


def mapped(rng: random.Random) -> Schema:
    return named(draw_record(rng, 2))


SHAPES: list[Callable[[random.Random], Schema]] = [
    *(alone, listed, paged, nested, united, referred, tree, mapped),
]


def compose() -> dict[str, Schema]:
    """The same ones each time."""
    schemas: dict[str, Schema] = {}
    for i in range(NUM_SCHEMAS):
        shape = SHAPES[i % len(SHAPES)]
        name = f"{shape.__name__}-{i // len(SHAPES)}"
        schemas[name] = shape(random.Random(f"{name} of the corpus"))  # of a str: the same anywhere
    return schemas


COMPOSED = compose()
