"""Why a body is no message, in the words of PROTOCOL.md: map, bin, nil, str, array.

msgspec speaks of objects, bytes and null, and Python of exceptions; whoever reads an ERROR may have
written the client in any language. Field names and paths such as `$.sampling.top_p` stay.
"""

from __future__ import annotations

import re
from typing import Final

import msgspec

_WORDS: Final = {"object": "map", "bytes": "bin", "null": "nil", "None": "nil", "datetime": "ext"}
_TYPES: Final = re.compile(r"(?:Expected|got) `[A-Za-z| ]+`")
_FIELDS: Final = {
    "Object missing required field": "the map lacks the required field",
    "Object contains unknown field": "the map has the unknown field",
}
_MAP_HEADS: Final = frozenset((*range(0x80, 0x90), 0xDE, 0xDF))


def explain(error: Exception) -> str:
    """What a decoder's exception says."""
    match error:
        case msgspec.ValidationError():
            text = str(error)
            for theirs, ours in _FIELDS.items():
                if text.startswith(theirs):
                    return ours + text.removeprefix(theirs)
            return _TYPES.sub(_in_our_words, text)
        case msgspec.DecodeError():
            return f"the body is not one whole msgpack value: {error}"
        case UnicodeDecodeError():
            return "a str in the body is not UTF-8"
        case RecursionError():
            return "the body is nested too deeply"
    return f"{type(error).__name__}: {error}"


def why_no_map(body: bytes) -> str | None:
    """Why a body cannot be a message by its first byte; None if it can."""
    if not body:
        return "the body is empty: it must be a msgpack map"
    if body[0] in _MAP_HEADS:
        return None
    if (start := body[:64].lstrip()[:1]) in (b"{", b"["):
        return f"the body begins with {start.decode()!r}: JSON? bodies are msgpack maps"
    return f"the body is no msgpack map: it begins with 0x{body[0]:02x}"


def _in_our_words(types: re.Match[str]) -> str:
    return re.sub("[A-Za-z]+", lambda word: _WORDS.get(word[0], word[0]), types[0])
