"""The web page: at / for browsers, and the files that it consists of.

Whoever loads it needs no key; what it asks of the server then does. Its policy lets it load from
and talk to its own origin alone, and run no script or style but its files.
"""

from __future__ import annotations

from typing import Final

from nanocore import __version__
from nanocore.http.errors import HttpError
from nanocore.http.exchange import Exchange
from nanocore.http.page_files import INDEX, PageFile, read_page_files

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
    b"cache-control": b"no-cache",  # kept, and asked for again by its tag
}
_FILES: Final = read_page_files()


async def root(exchange: Exchange) -> None:
    """GET and HEAD /: the page for browsers; for others, which look whether anybody is there, a
    name."""
    varies = exchange.reply_headers.get(b"vary")
    exchange.reply_headers[b"vary"] = b"accept" if varies is None else b"accept, " + varies
    if prefers_html(b",".join(exchange.headers(b"accept"))):
        await _reply(exchange, _FILES[INDEX])
    else:
        await exchange.reply_json({"name": "nanocore", "version": __version__})


async def file(exchange: Exchange) -> None:
    """A file of the page."""
    found = _FILES.get(exchange.path_id)
    if found is None:
        raise HttpError(404, f"the page has no file {exchange.path_id[:200]!r}", "not_found")
    await _reply(exchange, found)


def prefers_html(accept: bytes) -> bool:
    """Whether an Accept header names text/html, and does not like JSON better; `*/*` is no name."""
    qualities = {b"text/html": 0.0, b"application/json": 0.0}
    for entry in accept.lower().split(b","):
        kind, *parameters = (part.strip() for part in entry.split(b";"))
        if kind in qualities:
            qualities[kind] = _quality(parameters)
    return 0 < qualities[b"text/html"] >= qualities[b"application/json"]


def _quality(parameters: list[bytes]) -> float:
    for parameter in parameters:
        name, _, value = parameter.partition(b"=")
        if name.strip() == b"q":
            try:
                return float(value)
            except ValueError:
                return 0.0
    return 1.0


async def _reply(exchange: Exchange, found: PageFile) -> None:
    exchange.reply_headers |= _HEADERS
    exchange.reply_headers[b"etag"] = found.etag
    known = exchange.header(b"if-none-match") or b""
    if found.etag in [tag.strip().removeprefix(b"W/") for tag in known.split(b",")]:
        await exchange.send(exchange.start(304, found.content_type, []))
        await exchange.send({"type": "http.response.body", "body": b""})
    else:
        await exchange.reply(200, found.body, found.content_type)
