"""schema.json: the JSON Schema of every body, out of the types, with the meanings of PROTOCOL.md.

JSON has no binary strings: a bin is a string of hex digits here, as in the vectors.
"""

from __future__ import annotations

import json
from typing import Any

import msgspec

from nanocore.protocol.messages import FROM_CLIENT, FROM_ENGINE, PROTOCOL_VERSION, Op
from tests.protocol_files.tables import HEADINGS, SAME_TABLE, read_tables

_MESSAGES = {message.op: message for message in (*FROM_CLIENT, *FROM_ENGINE)}


def make_schema(document: str) -> str:
    """The text of schema.json. document: PROTOCOL.md."""
    structs = sorted({*HEADINGS.values(), *SAME_TABLE.values()}, key=lambda struct: struct.__name__)
    _, definitions = msgspec.json.schema_components(structs, ref_template="#/$defs/{name}")
    tables = read_tables(document)
    for heading, struct in (*HEADINGS.items(), *SAME_TABLE.items()):
        definition = definitions[struct.__name__]
        definition["description"] = f"PROTOCOL.md, {heading.strip('# ')}"
        meanings = {row[0]: row[5] for row in tables[heading]}
        for name, field in definition["properties"].items():
            definition["properties"][name] = {"description": meanings[name]} | _with_hex(field)
    schema = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "nanocore wire protocol, version {}.{}".format(*PROTOCOL_VERSION),
        "description": "Bodies by op. A bin is written as hex digits; an int32 or uint32 `column` "
        "is little endian. `since` names the version that brought a field.",
        "operations": [
            {
                "op": f"0x{op:02x}",
                "name": op.name,
                "from": [
                    side
                    for side, messages in (("client", FROM_CLIENT), ("engine", FROM_ENGINE))
                    if _MESSAGES[op] in messages
                ],
                "body": {"$ref": f"#/$defs/{_MESSAGES[op].__name__}"},
            }
            for op in Op
        ],
        "$defs": definitions,
    }
    return json.dumps(schema, indent=1, ensure_ascii=False) + "\n"


def _with_hex(schema: dict[str, Any]) -> dict[str, Any]:
    """A field's schema with hex where msgspec says base64."""
    if "anyOf" in schema:
        return schema | {"anyOf": [_with_hex(branch) for branch in schema["anyOf"]]}
    if "contentEncoding" not in schema:
        return schema
    digits, least = (8, "+") if "minItems" in schema else (8 if "column" in schema else 2, "*")
    rest = {key: value for key, value in schema.items() if key != "minItems"}
    return rest | {"contentEncoding": "base16", "pattern": f"^([0-9a-f]{{{digits}}}){least}$"}
