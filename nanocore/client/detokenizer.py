"""Incremental detokenization: text piece by piece, each piece whole UTF-8.

A character may span tokens; its bytes are held back until it is complete. What is still incomplete
when a request ends is dropped, so no output ever holds half a character.
"""

from __future__ import annotations

from tokenizers.decoders import DecodeStream

from nanocore.client.tokenizer import Tokenizer


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
        self._backend = tokenizer.backend
        self._skip_special_tokens = skip_special_tokens
        # A few tokens are context enough, and priming with them does not depend on prompt length.
        self._stream = DecodeStream(
            ids=prompt_token_ids[-8:], skip_special_tokens=skip_special_tokens
        )

    def append(self, token_ids: list[int]) -> str:
        """The text that these tokens complete."""
        pieces = (self._stream.step(self._backend, token_id) for token_id in token_ids)
        return "".join(piece for piece in pieces if piece)
