"""Writes what follows from the code: PROTOCOL.md's examples, and schema.json."""

from __future__ import annotations

from pathlib import Path

from tools.protocol.examples import with_examples
from tools.protocol.schema import make_schema

ROOT = Path(__file__).parents[2]
DOCUMENT = ROOT / "PROTOCOL.md"
SCHEMA = ROOT / "nanocore" / "conformance" / "schema.json"


def main() -> None:
    """Write both anew."""
    document = with_examples(DOCUMENT.read_text("utf-8"))
    DOCUMENT.write_text(document, "utf-8")
    SCHEMA.write_text(make_schema(document), "utf-8")


if __name__ == "__main__":
    main()
