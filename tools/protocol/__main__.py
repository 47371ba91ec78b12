"""Writes what is made by scripts: PROTOCOL.md's examples, schema.json, and vectors.jsonl."""

from __future__ import annotations

from pathlib import Path

from tools.protocol.examples import with_examples
from tools.protocol.make_vectors import VECTORS, text
from tools.protocol.schema import make_schema

ROOT = Path(__file__).parents[2]
DOCUMENT = ROOT / "PROTOCOL.md"
SCHEMA = ROOT / "nanocore" / "conformance" / "schema.json"


def main() -> None:
    """Write all of them anew."""
    document = with_examples(DOCUMENT.read_text("utf-8"))
    DOCUMENT.write_text(document, "utf-8")
    SCHEMA.write_text(make_schema(document), "utf-8")
    VECTORS.write_text(text())


if __name__ == "__main__":
    main()
