"""The web page: at / for browsers, and its files, which are read once at start.

Loading it needs no key; the requests it makes do. A path is looked up among the files that were
read and never joined to a folder, so no other file of the machine can be reached.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Final

import msgspec

from nanocore import __version__
from nanocore.http.exchange import Exchange
from nanocore.http.http_errors import HttpError

FOLDER: Final = Path(__file__).parent.parent / "page"
INDEX: Final = "index.html"
_TYPES: Final = {
    ".html": b"text/html; charset=utf-8",
    ".css": b"text/css; charset=utf-8",
    ".js": b"text/javascript; charset=utf-8",
    ".mjs": b"text/javascript; charset=utf-8",
    ".svg": b"image/svg+xml",
}
# Only its own files may run or load, and it may only connect to its own origin: a model's output is
# shown as text and can neither run nor fetch anything.
POLICY: Final = (
    b"default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self';"
    b" base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS: Final = {
    b"content-security-policy": POLICY,
    b"x-content-type-options": b"nosniff",
    b"referrer-policy": b"no-referrer",
    b"cross-origin-opener-policy": b"same-origin",
    b"cross-origin-resource-policy": b"same-origin",
    b"cache-control": b"no-cache",  # cached, and revalidated by its ETag
}


class PageFile(msgspec.Struct, frozen=True):
    """A file of the page. etag: with quotes; changes with the body."""

    body: bytes
    content_type: bytes
    etag: bytes


def _read(path: Path) -> PageFile:
    body = path.read_bytes()
    digest = hashlib.sha256(body).hexdigest()[:32]
    return PageFile(body, _TYPES[path.suffix], b'"%b"' % digest.encode())


_FILES: Final = {
    path.relative_to(FOLDER).as_posix(): _read(path)
    for path in FOLDER.rglob("*")
    if path.suffix in _TYPES
}
NAMES: Final = frozenset(_FILES)


async def root(exchange: Exchange) -> None:
    """Reply to a browser with the page, to other clients with the server's name."""
    varies = exchange.reply_headers.get(b"vary")
    exchange.reply_headers[b"vary"] = b"accept" if varies is None else b"accept, " + varies
    if any(b"text/html" in accept.lower() for accept in exchange.headers(b"accept")):
        await _reply(exchange, _FILES[INDEX])
    else:
        await exchange.reply_json({"name": "nanocore", "version": __version__})


async def file(exchange: Exchange) -> None:
    found = _FILES.get(exchange.path_id)
    if found is None:
        raise HttpError(404, f"the page has no file {exchange.path_id[:200]!r}", "not_found")
    await _reply(exchange, found)


async def _reply(exchange: Exchange, found: PageFile) -> None:
    exchange.reply_headers |= _HEADERS
    exchange.reply_headers[b"etag"] = found.etag
    known = exchange.header(b"if-none-match") or b""
    if found.etag in [tag.strip().removeprefix(b"W/") for tag in known.split(b",")]:
        await exchange.send(exchange.start(304, found.content_type, []))
        await exchange.send({"type": "http.response.body", "body": b""})
    else:
        await exchange.reply(200, found.body, found.content_type)
