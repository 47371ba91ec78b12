"""Bounds on what a JSON body consists of, checked before any of it is decoded.

The decoder holds the interpreter's lock, and dialects walk what it makes in the event loop. A body
bounded in bytes alone could hold millions of lists, and would hold up all requests for seconds.
"""

from __future__ import annotations

from typing import Final

from nanocore.http.errors import HttpError

MAX_ITEMS: Final = 1 << 16
"""Strings, and lists and objects."""
MAX_COMMAS: Final = 1 << 20
"""Between values; most of so many are between token ids."""


def check_bounds(body: bytes) -> None:
    """Count in C what is outside of strings; the body need not be JSON.

    Raises:
        HttpError: there is too much of something.
    """
    if len(body) <= MAX_ITEMS or all(num <= most for num, most, _ in _counts(body)):
        return  # as nearly always, whatever the texts hold
    body = body.replace(rb"\\", b"").replace(rb"\"", b"")  # each quote left begins or ends a string
    if body.count(b'"') <= 2 * MAX_ITEMS:
        body = b'""'.join(body.split(b'"')[::2])
    for number, most, name in _counts(body):
        if number > most:
            raise HttpError(
                413,
                f"the body has {number} {name}: at most {most} are taken; send several requests",
            )


def _counts(body: bytes) -> list[tuple[int, int, str]]:
    """Number, limit and name of each kind, as if the body had no text with such characters."""
    return [
        (body.count(b'"') // 2, MAX_ITEMS, "strings, keys of objects among them"),
        (body.count(b"[") + body.count(b"{"), MAX_ITEMS, "lists and objects"),
        (body.count(b","), MAX_COMMAS, "commas outside of strings"),
    ]
