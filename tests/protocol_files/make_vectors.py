"""The text of conformance/nanocore_conformance/vectors.jsonl: messages, and what they are answered.

`python -m tests.protocol_files` writes it; a test compares. The format is described in
conformance/nanocore_conformance/vectors.py.
"""

from __future__ import annotations

import json
from pathlib import Path

from tests.protocol_files.lines import Line
from tests.protocol_files.malformed_fields import field_lines
from tests.protocol_files.malformed_shapes import shape_lines
from tests.protocol_files.valid_client import valid_client_lines
from tests.protocol_files.valid_engine import either_way, valid_engine_lines

VECTORS = Path(__file__).parents[2] / "conformance" / "nanocore_conformance" / "vectors.jsonl"


def vectors() -> list[Line]:
    """All lines, those of clients first, the valid ones first among these."""
    return [
        *valid_client_lines(), *either_way("client"), *shape_lines("client"),
        *field_lines("client"),
        *valid_engine_lines(), *shape_lines("engine"), *field_lines("engine"),
    ]  # fmt: skip


def text() -> str:
    """The file's content."""
    lines = vectors()
    names = [line["name"] for line in lines]
    twice = {name for name in names if names.count(name) > 1}
    assert not twice, f"names must be unique: {sorted(twice)}"
    return "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines)
