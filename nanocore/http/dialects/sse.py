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
escaped = msgspec.json.Encoder().encode
"""A text as JSON has it, in quotes; lone surrogates cannot come, for texts are decoded UTF-8."""


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
