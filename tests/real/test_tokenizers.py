"""Tokenizers made of a GGUF vocabulary, beside llama.cpp's and a model's original one.

Both other sides are digests in llama_cpp.json, one of every hundred of 5,060 texts.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from nanocore.client.tokenizer import Tokenizer
from tests.client.byte_tokens import SYMBOLS
from tests.real.checkpoints import MARKS, MODELS
from tests.real.lines import texts
from tests.real.llama_cpp import FILE, SPACE, digests, original_texts

pytestmark = MARKS


@pytest.fixture
def recorded(model_name: str) -> dict[str, Any]:
    """What llama.cpp and the original tokenizer make of this file."""
    found: dict[str, Any] = json.loads(FILE.read_text())[model_name]
    assert found["sha256"] == MODELS[model_name].sha256
    return found


def encode(tokenizer: Tokenizer, wanted: list[str]) -> list[list[int]]:
    return [list(tokenizer.encode(text, add_special_tokens=False)) for text in wanted]


def test_5060_texts_have_the_tokens_of_llama_cpp(
    tokenizer: Tokenizer, recorded: dict[str, Any]
) -> None:
    found = digests(encode(tokenizer, texts()))
    assert found == recorded["tokens"], "each entry stands for a hundred texts"


def test_texts_have_the_tokens_of_the_original_tokenizer(
    tokenizer: Tokenizer, recorded: dict[str, Any]
) -> None:
    if "original_tokens" not in recorded:
        pytest.skip("no package has the model's original tokenizer")
    assert len(original_texts()) > 0.97 * len(texts())
    assert digests(encode(tokenizer, original_texts())) == recorded["original_tokens"]


def test_tokens_become_the_text_that_they_were_made_of(tokenizer: Tokenizer) -> None:
    """But for U+2581 where a vocabulary has it for a space, and bytes that a vocabulary lacks:
    SmolLM2's was made of texts without 21 of them."""
    vocabulary = tokenizer.backend.get_vocab()
    lost = bytes(b for b, s in SYMBOLS.items() if not {s, f"<0x{b:02X}>"} & vocabulary.keys())
    num_kept = 0
    for text in texts():
        token_ids = list(tokenizer.encode(text, add_special_tokens=False))
        decoded = tokenizer.decode(token_ids, skip_special_tokens=False)
        if not set(lost) & set(text.encode()):
            assert decoded.replace(SPACE, " ") == text.replace(SPACE, " ")
            num_kept += 1
    assert num_kept > 0.95 * len(texts())
