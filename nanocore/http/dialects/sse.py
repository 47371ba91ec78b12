"""Server-sent events, put together from pieces: a prefix, an escaped text, a suffix.

Making JSON of a whole object for each token costs several times as much as all else that is done
for it; what does not change from chunk to chunk is made once.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

DONE: Final = b"data: [DONE]\n\n"
COMMENT: Final = b": still here\n\n"
"""Keeps proxies from closing a stream that has nothing to say yet."""
_encode: Final = msgspec.json.Encoder().encode
_LINE_ENDS: Final = [(c.encode(), b"\\u%04x" % ord(c)) for c in "\u0085\u2028\u2029"]
"""Many clients read lines by Python's splitlines, for which these end one."""


def on_one_line(json: bytes) -> bytes:
    """JSON without line ends of any kind."""
    if b"\xe2\x80" in json or b"\xc2\x85" in json:
        for character, escape in _LINE_ENDS:
            json = json.replace(character, escape)
    return json


def escaped(value: object) -> bytes:
    """JSON on one line; lone surrogates cannot come, for texts are decoded UTF-8."""
    return on_one_line(_encode(value))


def data(value: object) -> bytes:
    """An event without a name."""
    return b"data: " + escaped(value) + b"\n\n"


def event(name: str, value: object) -> bytes:
    """An event with a name."""
    return b"event: " + name.encode() + b"\ndata: " + escaped(value) + b"\n\n"


def around(value: dict[str, Any], place: str, name: str | None = None) -> tuple[bytes, bytes]:
    """What stands before and after the JSON value that is `place` in this one.

    place: a string that is a value in it once, and nowhere else. name: the event's.
    """
    whole = data(value) if name is None else event(name, value)
    before, _, after = whole.partition(escaped(place))
    assert after, "the place is there"
    return before, after
