"""Texts of single tokens: what a token adds to a text, independently of the tokens before it.

Most decoders allow that. Byte-level ones (GPT-2, Llama 3, Qwen) join the tokens' bytes, and those
of SentencePiece (Llama 2, Gemma) join their texts; only the first token differs. A token with
incomplete characters has bytes in place of text.
"""

from __future__ import annotations

import json
import re
from functools import cached_property
from typing import Any, Final, NamedTuple

import tokenizers

REPLACEMENT: Final = "\ufffd"
"""Character that invalid UTF-8 decodes to."""
MAX_TOKEN_IDS: Final = 1 << 32
"""Limit of token ids in the library; no tokenizer has more."""
_BYTE_TOKEN: Final = re.compile("<0x([0-9A-Fa-f]{2})>")
_JOINING_STEPS: Final = frozenset({"ByteLevel", "Fuse"})
_SINGLE_STEPS: Final = frozenset({"Replace", "ByteFallback", "Metaspace", "WordPiece"})


class TokenText(NamedTuple):
    """Text and bytes that one token adds to a text, for logprobs.

    text: incomplete characters are U+FFFD. bytes: the token's own, which join to whole characters;
    empty for unknown ids.
    """

    text: str
    bytes: bytes


class TokenTexts(dict[int, str | bytes]):
    """Texts by token id, filled on first use; "" for unknown ids.

    joins_bytes: the decoder only joins the tokens' bytes; the first token is no exception.
    are_exact: a token adds its text independently of the tokens before it. Otherwise the text is
    what it adds to some other token, or, if it changes that one, its text alone.
    """

    def __init__(self, backend: tokenizers.Tokenizer, skip_special_tokens: bool) -> None:
        super().__init__()
        steps = _decoder_steps(backend)
        names = {step["type"] for step in steps}
        self.joins_bytes = bool(names) and names <= _JOINING_STEPS
        self._has_byte_symbols = "ByteLevel" in names
        self._backend = backend
        self._skip_special_tokens = skip_special_tokens
        self.are_exact = self.joins_bytes or (
            _treats_tokens_singly(steps) and bool(self._anchor[0])
        )

    def __missing__(self, token_id: int) -> str | bytes:
        text: str | bytes = ""
        if 0 <= token_id < MAX_TOKEN_IDS:
            anchor_ids, anchor_text = self._anchor
            whole = self._decode([*anchor_ids, token_id])
            text = whole.removeprefix(anchor_text)
            if not self.are_exact and text in ("", whole):
                text = self._decode([token_id])
            if REPLACEMENT in text:
                text = self._partial(token_id, text)
        self[token_id] = text
        return text

    def first(self, token_id: int) -> str | bytes:
        """Return the text of a token at the beginning, where many decoders omit a space."""
        text = self[token_id]
        return self._decode([token_id]) if text and isinstance(text, str) else text

    def _partial(self, token_id: int, text: str) -> str | bytes:
        """Return the bytes of a text with U+FFFD, unless these are U+FFFD itself."""
        token = self._backend.id_to_token(token_id)
        assert token is not None, "it has a text"
        if self._has_byte_symbols:
            symbols = [_BYTES.get(symbol) for symbol in token]
            data = bytes(b for b in symbols if b is not None)
            if None in symbols:  # an added token, which stands for itself
                data = token.encode()
        elif match := _BYTE_TOKEN.fullmatch(token):
            data = bytes.fromhex(match[1])
        else:
            return text
        try:
            return data.decode()
        except UnicodeDecodeError:
            return data

    @cached_property
    def _anchor(self) -> tuple[list[int], str]:
        """Ordinary token that is put before others, so that they are not the first; and its text.

        [] and "" if there is none.
        """
        ordinary = range(0 if self.joins_bytes else self._backend.get_vocab_size())
        for token_id in ordinary:
            text = self._decode([token_id])
            if not text or text.isspace() or REPLACEMENT in text:
                continue
            if not _BYTE_TOKEN.fullmatch(self._backend.id_to_token(token_id) or ""):
                return [token_id], text
        return [], ""

    def _decode(self, token_ids: list[int]) -> str:
        text: str = self._backend.decode(token_ids, skip_special_tokens=self._skip_special_tokens)
        return text


def _decoder_steps(backend: tokenizers.Tokenizer) -> list[dict[str, Any]]:
    if backend.decoder is None:
        return []  # tokens are joined by spaces
    state: dict[str, Any] = json.loads(backend.decoder.__getstate__())
    return state["decoders"] if state["type"] == "Sequence" else [state]


def _treats_tokens_singly(steps: list[dict[str, Any]]) -> bool:
    """Whether these decoder steps handle each token alone, except for a space before the first."""
    fused = False  # into a single text
    for step in steps:
        if step["type"] == "Fuse":
            fused = True
        elif step["type"] == "Strip":
            if fused and (step["start"] > 1 or step["stop"] > 0):
                return False
        elif fused or step["type"] not in _SINGLE_STEPS:
            return False
    return True


def _byte_level_symbols() -> dict[str, int]:
    """Return the byte of each printable character of byte-level vocabularies."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


_BYTES: Final = _byte_level_symbols()
