"""Token ids of the tiny byte tokenizer: one per byte, so that tests can cut characters anywhere."""

from __future__ import annotations

from nanocore.client.tokenizer import Tokenizer
from tests.tiny_models import VOCAB_SIZE

END = VOCAB_SIZE - 1
"""The special token <|end|>."""


def _symbols() -> dict[int, str]:
    """The printable character that stands for each byte in byte-level vocabularies (GPT-2's)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {b: chr(b) for b in printable} | {b: chr(256 + i) for i, b in enumerate(others)}


SYMBOLS = _symbols()
"""By byte."""


def ids_of(tokenizer: Tokenizer, data: bytes | str) -> list[int]:
    """Token ids of bytes, whether or not they are valid UTF-8."""
    if isinstance(data, str):
        data = data.encode()
    vocab: dict[str, int] = tokenizer.backend.get_vocab()
    return [vocab[SYMBOLS[byte]] for byte in data]
