"""Text in which the spellings of some tokens are cut, so that they spell no token any more."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable
from typing import Final

from nanocore.protocol.errors import InvalidRequestError

_MAX_CUT_CHARS: Final = 64


class GuardedText:
    """Cuts the spellings of some tokens.

    Args:
        texts: of the tokens. normalized: of those that the tokenizer looks for in normalized text.
        normalize: how it does that. removed: texts that templates take out of others.
    """

    def __init__(
        self,
        texts: Iterable[str],
        normalized: Iterable[str] = (),
        normalize: Callable[[str], str] | None = None,
        removed: Collection[str] = (),
    ) -> None:
        self._removed = removed
        self._texts = {text for text in texts if text and not text.isspace()}
        self._prefixes = {
            text[:length]
            for text in self._texts
            for length in range(1, len(text))
            # Else many words would end with the beginning of some token, and many lines.
            if not text[:length].strip("\u2581 \t\n\r").isalnum()
            and text[:length].strip("\u2581 \t\n\r")
        }
        self._suffixes = {
            text[start:]
            for text in self._texts
            for start in range(1, len(text))
            if not text[start:].isalnum()
        }
        self._joined = "\0".join(self._texts)
        self._longest = max(map(len, self._texts), default=0)
        lengths: dict[str, set[int]] = {}
        for text in self._texts:
            if len(text) > 1:
                lengths.setdefault(text[:2], set()).add(len(text))
        self._lengths = {start: sorted(found) for start, found in lengths.items()}
        firsts = "".join(re.escape(first) for first in {text[0] for text in self._texts})
        self._first = re.compile(f"[{firsts}]" if firsts else r"(?!)")
        self._normalize = normalize
        self._normalized = GuardedText(normalized) if normalize is not None else None

    def cut(self, text: str, sentinel: str) -> str:
        """The text with the sentinel within each spelling.

        Also within the beginning of one at the text's end: templates trim texts and join them.

        Raises:
            InvalidRequestError: it holds a token of a single character.
        """
        if self._normalize is None and not self._first.search(text):
            return text
        pieces = []
        start = 0
        for end in self._cuts(text):
            pieces.append(text[start:end])
            start = end
        pieces.append(text[start:])
        if self._normalize is not None and self._normalized is not None:
            pieces = [self._cut_normalized(piece, sentinel) for piece in pieces]
            if self._normalized.begins_at_end(self._normalized_end(text)):
                pieces.append("")
        return sentinel.join(pieces)

    def _normalized_end(self, text: str) -> str:
        """Of the normalized text, enough for a token; much of a text may be normalized away."""
        assert self._normalize is not None
        assert self._normalized is not None
        num_chars = _MAX_CUT_CHARS
        while True:
            end = self._normalize(text[-num_chars:])
            if num_chars >= len(text) or len(end.rstrip()) > self._normalized._longest:
                return end
            num_chars *= 2

    def is_in(self, text: str) -> bool:
        """Whether one of the tokens is spelled in the text."""
        return any(self._is_at(found.start(), text) for found in self._first.finditer(text))

    def is_part(self, text: str) -> bool:
        """Whether the text is within one of the tokens, or begins with the end of one."""
        if self._normalize is not None and self._normalized is not None:
            if self._normalized.is_part(self._normalize(text)):
                return True
        if text in self._joined:
            return True
        return any(text[:length] in self._suffixes for length in range(1, self._longest))

    def completes(self, name: str) -> bool:
        """Whether a name could complete a token that a template begins, as in `"<" + name + ">"`.

        Plain words only make whole tags: else many a name would be part of some token.
        """
        if name.replace("_", "a").isalnum():
            return f"<{name}>" in self._texts or f"</{name}>" in self._texts
        return self.is_part(name)

    def begins_at_end(self, text: str) -> bool:
        """Whether the text's end is the beginning of a token."""
        text = text.rstrip()
        return any(text[start:] in self._prefixes for start in range(-self._longest, 0))

    def _is_at(self, start: int, text: str) -> bool:
        if text[start] in self._texts:
            return True
        for length in self._lengths.get(text[start : start + 2], ()):
            if text[start : start + length] in self._texts:
                return True
        return False

    def _cuts(self, text: str) -> list[int]:
        cuts = []
        stripped = len(text.rstrip())
        for found in self._first.finditer(text):
            start = found.start()
            if text[start] in self._texts:
                raise _uncuttable(text[start])
            if self._is_at(start, text) or (
                stripped - start < self._longest and text[start:stripped] in self._prefixes
            ):
                cuts.append(start + 1)
        if any(gap in text for gap in self._removed) and self._arises_in(text):
            return [found.end() for found in self._first.finditer(text)]
        return cuts

    def _arises_in(self, text: str) -> bool:
        """Whether a token, or its beginning at the end, comes of taking out what templates do."""
        length = len(text) + 1
        while len(text) < length:
            length = len(text)
            for gap in self._removed:
                text = text.replace(gap, "")
        return self.is_in(text) or self.begins_at_end(text)

    def _cut_normalized(self, text: str, sentinel: str) -> str:
        """Cut where normalization would make a token, e.g. of full-width or of capital letters.

        It does not say which characters became which: halves are searched until they are short,
        and then cut everywhere.
        """
        assert self._normalize is not None
        assert self._normalized is not None
        if not self._normalized.is_in(self._normalize(text)):
            return text
        if len(text) > _MAX_CUT_CHARS:
            middle = len(text) // 2
            halves = text[:middle], text[middle:]
            return sentinel.join(self._cut_normalized(half, sentinel) for half in halves)
        for character in text:
            if self._normalized.is_in(self._normalize(character)):
                raise _uncuttable(character)
        return sentinel.join(text)


def _uncuttable(character: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"the text of a conversation holds {character!r}, which is a special token of this model, "
        "and one character cannot be cut: leave it out"
    )
