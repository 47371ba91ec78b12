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


class JsonScanner:
    """Follows one JSON value. is_done: its end was found."""

    def __init__(self) -> None:
        self.is_done = False
        self._depth = 0
        self._is_in_string = False
        self._is_escaped = False

    def scan(self, text: str, at: int) -> int:
        """Return the end of the value's text, from `at` on.

        Stops before characters that are invalid in JSON: "<" outside of strings, control characters
        within one.
        """
        while at < len(text) and not self.is_done:
            if self._is_escaped:
                if text[at] < " ":
                    return at
                self._is_escaped = False
                at += 1
                continue
            found = self._pattern().search(text, at)
            if found is None:
                return len(text)
            if found[0] == "<" or (self._is_in_string and found[0] < " "):
                return found.start()
            if not self._is_in_string and not self._depth and found[0] in "}], \t\r\n":
                self.is_done = True
                return found.start()
            at = found.end()
            self._follow(found[0])
        return at

    def escape_control(self, character: str) -> str:
        """Return the control character at which `scan` stopped, escaped for a JSON string."""
        escaped = escape(character)
        if self._is_escaped:  # the backslash before it was emitted already
            self._is_escaped = False
            return escaped[1:]
        return escaped

    def _pattern(self) -> re.Pattern[str]:
        if self._is_in_string:
            return _IN_VALUE_STRING
        return _IN_BRACKETS if self._depth else _IN_SCALAR

    def _follow(self, character: str) -> None:
        if self._is_in_string:
            if character == "\\":
                self._is_escaped = True
                return
            self._is_in_string = False
        elif character == '"':
            self._is_in_string = True
            return
        else:
            self._depth += 1 if character in "{[" else -1
        self.is_done = self._depth == 0


class JsonReader(StreamReader):
    """Base of parsers of JSON. closer: the mark that ends a block; a value that is not complete
    ends there, too, unless the mark is in a string."""

    closer: ClassVar[str] = ""

    def json_value(self, sink: Sink) -> Steps[None]:
        """Read one value of any kind, unchanged."""
        scanner = JsonScanner()
        while not scanner.is_done:
            end = scanner.scan(self._text, self._at)
            if end > self._at:
                sink(self.take(end))
            elif scanner.is_done:
                return
            elif self._at < len(self._text):
                character = self._text[self._at]
                if character < " ":
                    self.take(self._at + 1)
                    sink(scanner.escape_control(character))
                elif self.closer and (yield from self.sees(self.closer)):
                    return
                else:
                    sink(self.take(self._at + 1))
            elif self._ended:
                return
            else:
                yield

    def json_text(self, sink: Sink) -> Steps[bool]:
        """Read a string and pass its content to `sink`; False if there is none, or it has no
        end."""
        if not (yield from self.accept('"')):
            return False
        while True:
            found = _IN_STRING.search(self._text, self._at)
            end = found.start() if found else len(self._text)
            if end > self._at:
                sink(self.take(end))
            if found is None:
                if self._ended:
                    return False
                yield
            elif found[0] == '"':
                self.take(end + 1)
                return True
            else:
                sink((yield from self._escape()))

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
