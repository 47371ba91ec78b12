"""Incremental detokenization: text piece by piece, each piece whole UTF-8.

A character may span tokens; its bytes are held back until it is complete. What is still incomplete
when a request ends is dropped, so no output ever ends in half a character.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from tokenizers.decoders import DecodeStream

from nanocore.client.tokenizer import REPLACEMENT, Tokenizer

MAX_CONTEXT_TOKENS: Final = 8
MAX_HELD_TOKENS: Final = 16
"""A character has four bytes at most: what is held longer than this will never be one."""


class IncrementalDetokenizer:
    """Turns one request's output tokens into text.

    Args:
        tokenizer: the model's.
        prompt_token_ids: context for the first token (a leading space may depend on it).
        skip_special_tokens: leave special tokens out of the text.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], skip_special_tokens: bool
    ) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._texts = tokenizer.token_texts(skip_special_tokens)
        context: list[int] = []
        if self._texts is None:
            # The library takes context that ends in half a character for text still to be shown.
            context = list(prompt_token_ids[-MAX_CONTEXT_TOKENS:])
            while context and tokenizer.decode(context, skip_special_tokens).endswith(REPLACEMENT):
                context.pop()
        self._stream = self._new_stream(context)
        self._held: list[int] = []

    def append(self, token_ids: list[int]) -> str:
        """The text that these tokens complete."""
        if len(token_ids) == 1:
            return self._step(token_ids[0])
        return "".join(map(self._step, token_ids))

    def _step(self, token_id: int) -> str:
        if self._texts is not None and not self._held:
            text = self._texts[token_id]
            if text is not None:
                return text
            self._stream = self._new_stream([])  # what came before has no influence
        return self._decode(token_id)

    def _decode(self, token_id: int) -> str:
        """The long way, for what depends on its neighbours."""
        try:
            piece: str | None = self._stream.step(self._tokenizer.backend, token_id)
        except Exception:  # the library's own type; it has lost its place over invalid bytes
            self._held.append(token_id)
            return self._restart()
        if piece is not None:
            if self._held:
                self._held = []
            return piece
        self._held.append(token_id)
        return self._restart() if len(self._held) >= MAX_HELD_TOKENS else ""

    def _restart(self) -> str:
        """Give up on what is held: show what it is worth, and begin anew after it."""
        text = self._tokenizer.decode(self._held, self._skip_special_tokens)
        self._stream = self._new_stream([] if text.endswith(REPLACEMENT) else self._held)
        self._held = []
        return text.removesuffix(REPLACEMENT)  # the last one may be the half of a character

    def _new_stream(self, context: list[int]) -> DecodeStream:
        return DecodeStream(ids=context, skip_special_tokens=self._skip_special_tokens)
