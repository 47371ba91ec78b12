"""JsonReader: JSON in a text that arrives in pieces.

Values are scanned for strings and brackets only, without recursion. They are passed on unchanged,
except that control characters within strings are escaped. Nothing checks that a value is
well-formed.
"""

from __future__ import annotations

import json
import re
from typing import ClassVar, Final

from nanocore.client.chat.parsing.stream_reader import Sink, Steps, StreamReader

_IN_STRING: Final = re.compile(r'["\\]')
_IN_VALUE_STRING: Final = re.compile(r'["\\\x00-\x1f]')
_IN_BRACKETS: Final = re.compile(r'["{}\[\]<]')
_IN_SCALAR: Final = re.compile(r'["{}\[\]<,\s]')
_HEX: Final = re.compile(r"[0-9a-fA-F]{4}")
_SIMPLE: Final = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f"}


def json_string(text: str) -> str:
    """Return the text as a JSON string."""
    return json.dumps(text, ensure_ascii=False)


def escape(text: str) -> str:
    """Return the text as a part of a JSON string."""
    return json_string(text)[1:-1]


class JsonReader(StreamReader):
    """Base of parsers of JSON. closer: the mark that ends a block; a value that is not complete
    ends there, too, unless the mark is in a string."""

    closer: ClassVar[str] = ""

    def json_value(self, sink: Sink) -> Steps[None]:
        """Read one value of any kind, unchanged."""
        depth = 0
        while True:
            mark = yield from self._before(_IN_BRACKETS if depth else _IN_SCALAR, sink)
            if mark is None or (not depth and mark not in '"{[<'):
                return
            if mark == "<" and self.closer and (yield from self.sees(self.closer)):
                return
            sink(self.take(self._at + 1))
            if mark == '"':
                yield from self._rest_of_string(sink)
            elif mark in "{[":
                depth += 1
            elif mark in "}]":
                depth -= 1
            if not depth and mark != "<":
                return

    def _rest_of_string(self, sink: Sink) -> Steps[None]:
        """Read a string after its first quote, unchanged but for control characters."""
        mark: str | None = ""
        while mark is not None and mark != '"':
            mark = yield from self._before(_IN_VALUE_STRING, sink)
            is_escaped = mark == "\\"
            if is_escaped:
                sink(self.take(self._at + 1))
                yield from self.fill(1)
            character = self.take(self._at + 1)
            sink(escape(character)[is_escaped:] if "" < character < " " else character)

    def _before(self, pattern: re.Pattern[str], sink: Sink) -> Steps[str | None]:
        """Pass the text before a character of this pattern to `sink`; None if the text ends."""
        while True:
            found = pattern.search(self._text, self._at)
            end = found.start() if found else len(self._text)
            if end > self._at:
                sink(self.take(end))
            if found or self._ended:
                return found and found[0]
            yield

    def json_text(self, sink: Sink) -> Steps[bool]:
        """Read a string and pass its content to `sink`; False if there is none, or it has no
        end."""
        if not (yield from self.accept('"')):
            return False
        while (mark := (yield from self._before(_IN_STRING, sink))) is not None:
            if mark == '"':
                self.take(self._at + 1)
                return True
            sink((yield from self._escape()))
        return False

    def word(self) -> Steps[str | None]:
        """Read a string; None if there is none, or it has no end."""
        pieces: list[str] = []
        return "".join(pieces) if (yield from self.json_text(pieces.append)) else None

    def _escape(self) -> Steps[str]:
        # An unknown escape is kept as text, half a surrogate pair becomes U+FFFD.
        if not (yield from self.fill(2)):
            return self.take(len(self._text))
        letter = self._text[self._at + 1]
        if letter != "u":
            self.take(self._at + 2)
            return _SIMPLE.get(letter, letter)
        code = yield from self._code_unit(0)
        if code is None:
            return self.take(self._at + 2)
        if 0xD800 <= code < 0xDC00:
            low = yield from self._code_unit(6)
            if low is not None and 0xDC00 <= low < 0xE000:
                self.take(self._at + 12)
                return chr(0x10000 + ((code - 0xD800) << 10) + low - 0xDC00)
        self.take(self._at + 6)
        return "\ufffd" if 0xD800 <= code < 0xE000 else chr(code)

    def _code_unit(self, offset: int) -> Steps[int | None]:
        for num_chars, expected in ((1, "\\"), (2, "\\u")):
            if not (yield from self.fill(offset + num_chars)):
                return None
            if not self._text.startswith(expected, self._at + offset):
                return None
        if not (yield from self.fill(offset + 6)):
            return None
        digits = self._text[self._at + offset + 2 : self._at + offset + 6]
        return int(digits, 16) if _HEX.fullmatch(digits) else None
