"""The page's files, as they are sent: read once, at the start, from a fixed list of names.

Owner: the endpoints of `endpoints.page`. A path is looked up in the list and never joined to a
folder, so nothing else of the machine can be asked for.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Final

import msgspec

FOLDER: Final = Path(__file__).parent / "page"
INDEX: Final = "index.html"
NAMES: Final = (
    INDEX, "icon.svg", "style.css", "chat.css", "live.css", "theme.js", "app.js", "answer.js",
    "api.js", "chat.js", "dom.js", "inline.js", "kept.js", "list.js", "live.js", "markdown.js",
    "message.js", "scroller.js", "settings.js", "steps.js", "store.js", "ways.js",
)  # fmt: skip
_TYPES: Final = {
    ".html": b"text/html; charset=utf-8",
    ".css": b"text/css; charset=utf-8",
    ".js": b"text/javascript; charset=utf-8",
    ".svg": b"image/svg+xml",
}


class PageFile(msgspec.Struct, frozen=True):
    """One of them. etag: changes with the body, quotes included."""

    body: bytes
    content_type: bytes
    etag: bytes


def read_page_files() -> Mapping[str, PageFile]:
    """All of them, by name."""
    return MappingProxyType({name: _read(FOLDER / name) for name in NAMES})


def _read(path: Path) -> PageFile:
    body = path.read_bytes()
    digest = hashlib.sha256(body).hexdigest()[:32]
    return PageFile(body, _TYPES[path.suffix], b'"%b"' % digest.encode())
