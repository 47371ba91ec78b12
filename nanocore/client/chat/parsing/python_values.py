"""Python's literals, one by one, as JSON."""

from __future__ import annotations

import json
import math
import re
from typing import Final

from nanocore.client.chat.parsing.json_reading import escape, json_string

_NUMBER: Final = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_HEX: Final = re.compile(r"(?:[0-9a-fA-F]{2}){1,4}")
_WORDS: Final = {"True": "true", "False": "false", "None": "null"}
_ESCAPES: Final = {
    "n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "a": "\a", "v": "\v", "0": "\0",
    "\\": "\\", "'": "'", '"': '"', "\n": "",
}  # fmt: skip


def atom_to_json(atom: str) -> str:
    """A word or a number as JSON; what Python would look up is a string."""
    if atom in ("true", "false", "null") or _NUMBER.fullmatch(atom):
        return atom
    if atom in _WORDS:
        return _WORDS[atom]
    for parse in (lambda text: int(text, 0), float):
        try:
            number = parse(atom)
            if math.isinf(number) or math.isnan(number):
                continue
            return json.dumps(number)
        except (ValueError, OverflowError):  # the number is none, or too large to be written
            continue
    return json_string(atom)


def escape_to_json(letter: str, digits: str) -> tuple[str, int]:
    """What backslash and letter say, within a JSON string; and how many of the digits belong to it.

    digits: for the letters x, u and U the characters that follow. An escape that is none says
    itself.
    """
    if letter in _ESCAPES:
        return escape(_ESCAPES[letter]), 0
    if letter in "xuU" and len(digits) == {"x": 2, "u": 4, "U": 8}[letter]:
        if _HEX.fullmatch(digits):
            code = int(digits, 16)
            if code < 0x10000:
                return f"\\u{code:04x}", len(digits)
            if code < 0x110000:
                return chr(code), len(digits)
    return escape("\\" + letter), 0
