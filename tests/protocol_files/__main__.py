"""Writes the files of the protocol that are made from the code: `python -m tests.protocol_files`.

PROTOCOL.md's byte examples, schema.json and vectors.jsonl in nanocore/conformance, and the table of
sampling parameters in docs/client.md. Tests compare them with what this would write.
"""

from __future__ import annotations

from pathlib import Path

from tests.protocol_files.examples import with_examples
from tests.protocol_files.make_vectors import VECTORS, text
from tests.protocol_files.parameters import with_parameters
from tests.protocol_files.schema import make_schema

ROOT = Path(__file__).parents[2]
DOCUMENT = ROOT / "PROTOCOL.md"
CLIENT_DOCUMENT = ROOT / "docs" / "client.md"
SCHEMA = ROOT / "conformance" / "nanocore_conformance" / "schema.json"


def main() -> None:
    """Write all of them anew."""
    document = with_examples(DOCUMENT.read_text("utf-8"))
    DOCUMENT.write_text(document, "utf-8")
    SCHEMA.write_text(make_schema(document), "utf-8")
    VECTORS.write_text(text())
    CLIENT_DOCUMENT.write_text(with_parameters(CLIENT_DOCUMENT.read_text("utf-8")), "utf-8")


if __name__ == "__main__":
    main()
