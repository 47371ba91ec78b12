"""Incremental detokenization: text piece by piece, each piece whole UTF-8.

A character may span tokens; its bytes are held back until it is complete. What is still incomplete
when a request ends is dropped, so no output ever ends in half a character.
"""

from __future__ import annotations

from typing import Final

from tokenizers.decoders import DecodeStream

from nanocore.client.tokenizer import Tokenizer

REPLACEMENT: Final = "\ufffd"
"""What bytes that are no UTF-8 decode to."""

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
        self, tokenizer: Tokenizer, prompt_token_ids: list[int], skip_special_tokens: bool
    ) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        # The library takes context that ends in half a character for text still to be shown.
        context = prompt_token_ids[-MAX_CONTEXT_TOKENS:]
        while context and tokenizer.decode(context, skip_special_tokens).endswith(REPLACEMENT):
            context.pop()
        self._stream = DecodeStream(ids=context, skip_special_tokens=skip_special_tokens)
        self._held: list[int] = []

    def append(self, token_ids: list[int]) -> str:
        """The text that these tokens complete."""
        return "".join(map(self._step, token_ids))

    def _step(self, token_id: int) -> str:
        self._held.append(token_id)
        try:
            piece = self._stream.step(self._tokenizer.backend, token_id)
        except Exception:  # the library's own type; it has lost its place over invalid bytes
            return self._restart()
        if piece is not None:
            self._held.clear()
            return str(piece)
        return self._restart() if len(self._held) >= MAX_HELD_TOKENS else ""

    def _restart(self) -> str:
        """Give up on what is held: show what it is worth, and begin anew after it."""
        text = self._tokenizer.decode(self._held, self._skip_special_tokens)
        context = [] if text.endswith(REPLACEMENT) else self._held
        self._stream = DecodeStream(ids=context, skip_special_tokens=self._skip_special_tokens)
        self._held = []
        return text.removesuffix(REPLACEMENT)  # the last one may be the half of a character
