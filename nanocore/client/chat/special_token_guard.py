"""Keeps special tokens out of users' text: spelling one does not produce it.

Such a spelling is cut by a sentinel after its first character: a character that occurs in no text
of the conversation. It passes through the template like any other character. The prompt is then
split at the sentinels, and the parts are tokenized separately, so no token spans two of them.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Collection, Iterable
from functools import cached_property
from typing import Any, Final

import tokenizers

from nanocore.client.chat.chat_messages import ROLES
from nanocore.protocol.errors import InvalidRequestError

_MAX_CUT_CHARS: Final = 64


class SpellingCutter:
    """Cuts the spellings of some tokens.

    Args:
        texts: of the tokens. normalized: those that the tokenizer matches in normalized text.
        normalize: the normalization. removed: texts that templates remove from others.
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
            # Otherwise many words and lines would end with the beginning of some token.
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
        self._normalized = SpellingCutter(normalized) if normalize is not None else None

    def cut(self, text: str, sentinel: str) -> str:
        """Return the text with a sentinel in each spelling.

        A beginning of a token at the text's end is cut, too: templates trim texts and join them.

        Raises:
            InvalidRequestError: a token of a single character is spelled in it.
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
        """Return the end of the normalized text, long enough for a token."""
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
        """Whether the text is part of a token, or begins with the end of one."""
        if self._normalize is not None and self._normalized is not None:
            if self._normalized.is_part(self._normalize(text)):
                return True
        if text in self._joined:
            return True
        return any(text[:length] in self._suffixes for length in range(1, self._longest))

    def completes(self, name: str) -> bool:
        """Whether a name could complete a token that a template begins, as in `"<" + name + ">"`.

        Plain words only complete whole tags; otherwise many names would be part of some token.
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
        """Whether a token, or its beginning at the end, arises when templates remove texts."""
        length = len(text) + 1
        while len(text) < length:
            length = len(text)
            for gap in self._removed:
                text = text.replace(gap, "")
        return self.is_in(text) or self.begins_at_end(text)

    def _cut_normalized(self, text: str, sentinel: str) -> str:
        """Cut where normalization makes a token, e.g. from full-width or capital letters.

        Normalization does not report positions: halves are searched until they are short, and then
        cut after every character.
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


_SENTINELS: Final = [chr(code) for code in range(0xFDD0, 0xFDF0)]
"""Unicode noncharacters: valid in strings, and never used in interchanged text."""
_ESCAPE: Final = re.compile(
    r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U(000[0-9a-fA-F]{5}|0010[0-9a-fA-F]{4})|(.))"
)
_CONTROLS: Final = {"n": "\n", "t": "\t", "r": "\r"}
_REPLACED: Final = re.compile(
    r"""\breplace\(\s*(?:'((?:[^'\\]|\\.)*)'|"((?:[^"\\]|\\.)*)")""", re.DOTALL
)
"""Texts that a template replaces, often with nothing, which joins their neighbours."""
Mark = Callable[[str], str]
"""Function that puts sentinels into a text, where it needs any."""


class SpecialTokenGuard:
    """Guard of the tokens that only the template may write.

    Args:
        backend: the tokenizer. template: the template's source, or several's.
    """

    def __init__(self, backend: tokenizers.Tokenizer, template: str) -> None:
        self._backend = backend
        self._template = template
        self._puts_spaces: bool | None = None

    def mark(self, conversation: dict[str, Any]) -> tuple[dict[str, Any], str | None]:
        """Return the conversation with its texts cut, and the sentinel, or None if none was needed.

        conversation: the template's variables, of plain types; "messages" is a list of dicts.

        Raises:
            InvalidRequestError: a token in it cannot be cut, or all sentinels are in use.
        """
        first = _SENTINELS[0]
        marked = self._marked(conversation, first)
        if marked == conversation:
            return conversation, None
        taken = json.dumps([conversation, self._template]).lower()  # its escapes stand for both
        free = (s for s in _SENTINELS if f"\\u{ord(s):x}" not in taken)
        sentinel = next(free, "")
        if not sentinel:
            raise InvalidRequestError(
                "the conversation contains special tokens as text and every noncharacter from "
                "U+FDD0 to U+FDEF: remove either"
            )
        return marked if sentinel == first else self._marked(conversation, sentinel), sentinel

    def _marked(self, conversation: dict[str, Any], sentinel: str) -> dict[str, Any]:
        def mark(text: str) -> str:
            return self._all.cut(text, sentinel)

        def mark_answer(text: str) -> str:
            return self._special.cut(text, sentinel)

        def mark_key(key: str) -> str:
            marked = mark(key)
            if self._all.completes(key) and not self._is_attribute(key):
                return f"{key[:1]}{sentinel}{marked[1:]}"
            return marked

        def mark_message(message: dict[str, Any]) -> dict[str, Any]:
            role = message.get("role")
            marked: dict[str, Any] = _map_texts(
                message, mark_answer if role == "assistant" else mark, mark_key
            )
            # Templates may write "<|" + role + "|>": another role's name could complete a token.
            if isinstance(role, str) and role not in ROLES:
                if self._all.is_part(role) and not self._is_constant(role):
                    marked["role"] = f"{role[:1]}{sentinel}{marked['role'][1:]}"
            return marked

        return {
            name: list(map(mark_message, value))
            if name == "messages"
            else _map_texts(value, mark, mark_key)
            for name, value in conversation.items()
        }

    def _is_constant(self, name: str) -> bool:
        return any(f"{quote}{name}{quote}" in self._template for quote in "'\"")

    def _is_attribute(self, name: str) -> bool:
        if self._is_constant(name):
            return True
        return re.search(rf"\.{re.escape(name)}\b", self._template) is not None

    def parts(self, text: str, sentinel: str | None) -> list[str]:
        """Split a rendered text at its sentinels, also where the template wrote them as JSON."""
        if sentinel is None:
            return [text]
        # Python's repr of a dict escapes them, too, and JSON may escape that again.
        return re.split(rf"{sentinel}|\\+u{ord(sentinel):x}", text, flags=re.IGNORECASE)

    def encode(
        self, parts: list[str], encode: Callable[[str], list[int]], max_tokens: float = math.inf
    ) -> list[int]:
        """Return token ids of such parts; stops early beyond max_tokens."""
        ids = encode(parts[0])
        for part in filter(None, parts[1:]):
            if len(ids) > max_tokens:
                break
            ids += self._encode_within(part, encode)
        return ids

    def _encode_within(self, part: str, encode: Callable[[str], list[int]]) -> list[int]:
        """Encode a part as if it stood within a text: some tokenizers add a space at a beginning.

        After a special token most do not. Those that do (Llama 2's) do not after a new line, unless
        the two make one token; then there is one extra space.
        """

        def after_special(text: str) -> list[int]:
            return encode(self._anchor + text)[1:] if self._anchor else encode(text)

        def after_line(text: str) -> list[int] | None:
            line, ids = encode("\n"), encode(f"\n{text}")
            return ids[len(line) :] if ids[: len(line)] == line else None

        if self._puts_spaces is None:
            self._puts_spaces = after_special("x") != (after_line("x") or after_special("x"))
        ids = after_line(part) if self._puts_spaces else None
        return after_special(part) if ids is None else ids

    @cached_property
    def _tokens(self) -> list[tokenizers.AddedToken]:
        return list(self._backend.get_added_tokens_decoder().values())

    @cached_property
    def _special(self) -> SpellingCutter:
        return self._guarded([token for token in self._tokens if token.special])

    @cached_property
    def _all(self) -> SpellingCutter:
        # Not in the model's own turns: templates search them for the end of reasoning.
        known = f"{self._template}\0{_ESCAPE.sub(_unescaped, self._template)}"
        return self._guarded([t for t in self._tokens if t.special or t.content in known])

    def _guarded(self, tokens: list[tokenizers.AddedToken]) -> SpellingCutter:
        texts = [token.content for token in tokens]
        removed = {
            _ESCAPE.sub(_unescaped, one or other)
            for one, other in _REPLACED.findall(self._template)
            if one or other
        }
        if self._backend.normalizer is None:
            return SpellingCutter(texts, removed=removed)
        normalize = self._backend.normalizer.normalize_str
        found = [normalize(token.content) for token in tokens if token.normalized]
        return SpellingCutter(texts, found, normalize if found else None, removed)

    @cached_property
    def _anchor(self) -> str:
        """Return a token after which a part is tokenized as within a text, or ""."""
        for token in self._tokens:
            plain = not (token.lstrip or token.rstrip or token.single_word or token.normalized)
            others = (other.content for other in self._tokens if other is not token)
            if token.special and plain and not any(o.startswith(token.content) for o in others):
                return str(token.content)
        return ""


def _map_texts(value: Any, mark: Mark, mark_key: Mark) -> Any:
    if isinstance(value, str):
        return mark(value)
    if isinstance(value, dict):
        return {mark_key(k): _map_texts(item, mark, mark_key) for k, item in value.items()}
    if isinstance(value, list):
        return [_map_texts(item, mark, mark_key) for item in value]
    return value


def _unescaped(found: re.Match[str]) -> str:
    *codes, other = found.groups()
    code = next(filter(None, codes), None)
    return chr(int(code, 16)) if code else _CONTROLS.get(other, other)
