"""Incremental detokenization: text piece by piece, each piece whole characters.

The rule: the pieces of a request make the text that decoding its prompt and output at once would
add to the prompt's. Exceptions are what can be told only later: a character that is incomplete when
the request ends is left out (at once, it would be U+FFFD), and of byte tokens (<0x80>) whole
characters count even if their neighbours are no UTF-8 (at once, the whole run would be U+FFFD).
How the tokens are cut into calls has no influence.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice
from os.path import commonprefix
from typing import Final

from nanocore.client.token_texts import REPLACEMENT, TokenTexts
from nanocore.client.tokenizer import Tokenizer

MAX_CONTEXT_TOKENS: Final = 8
MAX_WINDOW_TOKENS: Final = 24
"""When there are more, all but MAX_CONTEXT_TOKENS are forgotten: seldom, for it costs a decode."""
MAX_CHARACTER_BYTES: Final = 4
MAX_HELD_TOKENS: Final = 16
"""A character has four bytes at most: what is held longer than this will never be one."""


class IncrementalDetokenizer:
    """Turns one request's output tokens into text.

    Args:
        tokenizer: the model's.
        prompt_token_ids: what the output follows (a leading space may depend on it).
        skip_special_tokens: leave special tokens out of the text.

    tokens_per_slice: as many at once hold the caller up for one or two milliseconds.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], skip_special_tokens: bool
    ) -> None:
        self._source: _SingleTokens | _Window
        texts = tokenizer.token_texts(skip_special_tokens)
        if texts.are_exact:
            self._source = _SingleTokens(texts, prompt_token_ids)
        else:
            self._source = _Window(tokenizer, prompt_token_ids, skip_special_tokens)
        self.tokens_per_slice = self._source.tokens_per_slice
        self.push = self._source.push  # one token, and the text that it completes

    def append(self, token_ids: list[int]) -> str:
        """The text that these tokens complete."""
        if len(token_ids) == 1:
            return self.push(token_ids[0])
        return "".join(map(self.push, token_ids))

    def flush(self) -> str:
        """The text held back, when no more tokens will come."""
        return self._source.flush()


class _SingleTokens:
    """For tokens that have texts of their own: only bytes of half a character are kept."""

    tokens_per_slice: Final = 200  # of 0.7 us; of 8 us, if it is the first time for each

    def __init__(self, texts: TokenTexts, prompt_token_ids: Sequence[int]) -> None:
        self._texts = texts
        self._bytes = b""
        self._is_first = not texts.joins_bytes and not any(
            texts[token_id] for token_id in reversed(prompt_token_ids)
        )

    def push(self, token_id: int) -> str:
        """The characters that this token completes."""
        text = self._texts[token_id]
        if self._is_first and text:
            text = self._texts.first(token_id)
            self._is_first = False
        if type(text) is str:
            if not self._bytes or not text:
                return text
            text = text.encode()
        assert isinstance(text, bytes)
        data = self._bytes + text
        characters, num_bytes = codecs.utf_8_decode(data, "replace", False)
        self._bytes = data[num_bytes:]
        return characters

    def flush(self) -> str:
        """Nothing if half a character is held; Python holds other bytes, too (a surrogate's)."""
        text = self._bytes.decode("utf-8", "replace")
        return "" if text == REPLACEMENT else text


class _Window:
    """For tokens whose text depends on those before: a decode of the last few shows what one adds.

    Tokens that no decode shows are left out, or they would push the others out of the window.
    """

    tokens_per_slice: Final = 100  # of 10 us; of 20 us, if it is all half characters

    def __init__(
        self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], skip_special_tokens: bool
    ) -> None:
        self._is_decoded = partial(tokenizer.is_decoded, skip_special_tokens=skip_special_tokens)
        self._decode: Callable[[list[int]], str] = partial(
            tokenizer.backend.decode, skip_special_tokens=skip_special_tokens
        )
        last = islice(filter(self._is_decoded, reversed(prompt_token_ids)), MAX_CONTEXT_TOKENS)
        self._context = [*last][::-1]
        self._shown = self._decode(self._context)
        self._held: list[int] = []

    def push(self, token_id: int) -> str:
        """The text that this token adds; "" while it may be half a character."""
        if not self._is_decoded(token_id):
            return ""
        self._held.append(token_id)
        text = self._decode(self._context + self._held)
        if text.endswith(REPLACEMENT) and len(self._held) < MAX_HELD_TOKENS:
            return ""
        return self._take(text)

    def flush(self) -> str:
        """What is held back, without the half character."""
        return self._take(self._decode(self._context + self._held).removesuffix(REPLACEMENT))

    def _take(self, text: str) -> str:
        added = text[len(commonprefix([self._shown, text])) :]  # noqa: RUF071  these are no paths
        self._context += self._held
        self._shown = text
        self._held = []
        if len(self._context) > MAX_WINDOW_TOKENS:
            self._forget()
        return added

    def _forget(self) -> None:
        """Keep the last tokens, some more if they would begin inside a character of several."""
        for num_tokens in range(MAX_CONTEXT_TOKENS, MAX_CONTEXT_TOKENS + MAX_CHARACTER_BYTES):
            context = self._context[-num_tokens:]
            shown = self._decode(context)
            if REPLACEMENT not in shown:
                break
        self._context, self._shown = context, shown
