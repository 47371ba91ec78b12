"""Why a body is no message, in the words of PROTOCOL.md: map, bin, nil, str, array.

msgspec speaks of objects, bytes and null, and Python of exceptions; whoever reads an ERROR may have
written the client in any language. Field names and paths such as `$.sampling.top_p` stay.
"""

from __future__ import annotations

import re
from difflib import SequenceMatcher
from typing import Any, Final, get_args, get_type_hints

import msgspec

_WORDS: Final = {"object": "map", "bytes": "bin", "null": "nil", "None": "nil", "datetime": "ext"}
_TYPES: Final = re.compile(r"(?:Expected|got) `[A-Za-z| ]+`")
_FIELDS: Final = {
    "Object missing required field": "the map lacks the required field",
    "Object contains unknown field": "the map has the unknown field",
}
_UNKNOWN: Final = re.compile(r"Object contains unknown field `(.*?)`(?: - at `(.*)`)?", re.DOTALL)
_MIN_NEARNESS: Final = 0.7
_MAX_NAME_CHARS: Final = 64
_MAP_HEADS: Final = frozenset((*range(0x80, 0x90), 0xDE, 0xDF))


def explain(error: Exception, expected: Any = None) -> str:
    """What a decoder's exception says.

    expected: the struct that the body was to be; an unknown field's nearest one is then named.
    """
    match error:
        case msgspec.ValidationError():
            text = str(error)
            for theirs, ours in _FIELDS.items():
                if text.startswith(theirs):
                    return ours + text.removeprefix(theirs) + _nearest_field(text, expected)
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


def _nearest_field(text: str, expected: Any) -> str:
    """A question that names the field which was meant, if one of that map is near, or several."""
    unknown = _UNKNOWN.fullmatch(text)
    if unknown is None:
        return ""
    name, path = unknown.groups()
    struct = expected
    for part in (path or "").split(".")[1:]:
        hints = get_type_hints(struct) if _is_struct(struct) else {}
        struct = _struct_in(hints.get(part.partition("[")[0]))
    if not _is_struct(struct) or len(name) > _MAX_NAME_CHARS:
        return ""
    fields: tuple[str, ...] = struct.__struct_encode_fields__
    for field, hint in get_type_hints(struct).items():
        inner = _struct_in(hint)
        if inner is not None and name in inner.__struct_encode_fields__:
            return f" - it belongs into `{field}`"
    nearness = {
        field: field.startswith(f"{name}_") or SequenceMatcher(None, field, name).ratio()
        for field in fields
    }
    most = max(nearness.values())
    nearest = [f"`{field}`" for field in fields if nearness[field] == most >= _MIN_NEARNESS]
    return f" - did you mean {' or '.join(nearest)}?" if nearest else ""


def _struct_in(hint: Any) -> Any:
    """The struct that a field's type is, may be, or is a list of; None if there is none."""
    return next(filter(_is_struct, (hint, *get_args(hint))), None)


def _is_struct(hint: Any) -> bool:
    return isinstance(hint, type) and issubclass(hint, msgspec.Struct)


def _in_our_words(types: re.Match[str]) -> str:
    return re.sub("[A-Za-z]+", lambda word: _WORDS.get(word[0], word[0]), types[0])
