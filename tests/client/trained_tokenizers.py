"""Tokenizers of every kind of model, trained on a few lines: as libraries put them together."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from typing import Any

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from nanocore.client.tokenizer import Tokenizer
from tests.client.byte_tokens import SYMBOLS

CORPUS = [
    "The quick brown fox, it's said, doesn't jump: 1234 + 5678.\n\n\tIndented  twice.",
    "日本語のテスト文字列。中文字符測試、没有空格。한국어 문장입니다.",
    "👍🏽 👨‍👩‍👧 🇩🇪🇫🇷 ❤️ 🏴󠁧󠁢󠁳󠁣󠁴󠁿 emoji!",
    "e\u0301a\u0308o\u0323\u0302 Zalgo\u0336\u0337 \u1100\u1161\u11a8 naïve café",
    "שלום עולם! مرحبا بالعالم \u202eabc\u202c नमस्ते दुनिया ไทย",
]
SPECIAL = ["<unk>", "<s>", "</s>"]
_SPACE = decoders.Replace("▁", " ")


def _trained(model: Any, trainer: Any, **parts: Any) -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(model)
    for name, part in parts.items():
        setattr(backend, name, part)
    backend.train_from_iterator(CORPUS * 3, trainer)
    backend.add_tokens([" added ", "文字"])
    return backend


def _byte_level(pre_tokenizer: Any) -> tokenizers.Tokenizer:
    """As GPT-2, Llama 3 and Qwen."""
    trainer = trainers.BpeTrainer(
        vocab_size=420, special_tokens=SPECIAL, initial_alphabet=[*SYMBOLS.values()],
        show_progress=False,
    )  # fmt: skip
    return _trained(
        models.BPE(), trainer, pre_tokenizer=pre_tokenizer, decoder=decoders.ByteLevel()
    )


_LLAMA_3 = pre_tokenizers.Sequence(
    [
        pre_tokenizers.Split(
            tokenizers.Regex(r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s+"),
            "isolated",
        ),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]
)


def _with_byte_tokens(steps: list[Any], **parts: Any) -> tokenizers.Tokenizer:
    """As Llama 2, Mistral and Gemma: characters that were not trained fall back to bytes."""
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=330, special_tokens=SPECIAL, show_progress=False, limit_alphabet=40
    )
    backend = _trained(models.BPE(unk_token="<unk>"), trainer, **parts)
    model: dict[str, Any] = json.loads(backend.to_str())["model"]
    vocab: dict[str, int] = model["vocab"]
    vocab |= {token: len(vocab) + i for i, token in enumerate(byte_tokens)}
    merges = [tuple(merge) for merge in model["merges"]]
    backend = tokenizers.Tokenizer(
        models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    for name, part in parts.items():
        setattr(backend, name, part)
    backend.decoder = decoders.Sequence(steps)
    backend.add_special_tokens(SPECIAL)
    backend.add_tokens([" added ", "文字"])
    return backend


def _unigram() -> tokenizers.Tokenizer:
    trainer = trainers.UnigramTrainer(
        vocab_size=300, special_tokens=SPECIAL, unk_token="<unk>", show_progress=False
    )
    metaspace = pre_tokenizers.Metaspace()
    return _trained(
        models.Unigram(), trainer, pre_tokenizer=metaspace, decoder=decoders.Metaspace()
    )


def _word_piece() -> tokenizers.Tokenizer:
    trainer = trainers.WordPieceTrainer(vocab_size=300, special_tokens=SPECIAL, show_progress=False)
    return _trained(
        models.WordPiece(unk_token="<unk>"), trainer,
        pre_tokenizer=pre_tokenizers.BertPreTokenizer(), decoder=decoders.WordPiece(),
    )  # fmt: skip


def _words() -> tokenizers.Tokenizer:
    trainer = trainers.WordLevelTrainer(special_tokens=SPECIAL, show_progress=False)
    whitespace = pre_tokenizers.Whitespace()
    return _trained(models.WordLevel(unk_token="<unk>"), trainer, pre_tokenizer=whitespace)


def _suffixes() -> tokenizers.Tokenizer:
    """As GPT-1: the last token of a word says so."""
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=SPECIAL, end_of_word_suffix="</w>", show_progress=False
    )
    return _trained(
        models.BPE(unk_token="<unk>", end_of_word_suffix="</w>"), trainer,
        pre_tokenizer=pre_tokenizers.WhitespaceSplit(), decoder=decoders.BPEDecoder(),
    )  # fmt: skip


def _letters() -> tokenizers.Tokenizer:
    letters = sorted({*"".join(CORPUS)} - {" "})
    vocab = {token: i for i, token in enumerate([*SPECIAL, "<pad>", "|", *letters])}
    backend = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    backend.normalizer = normalizers.Replace(" ", "|")
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    backend.decoder = decoders.CTC("<pad>", "|")
    backend.add_special_tokens(SPECIAL)
    backend.add_tokens([" added ", "文字"])
    return backend


_PREPEND = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
TRAINED: dict[str, Callable[[], tokenizers.Tokenizer]] = {
    "byte-level gpt-2": lambda: _byte_level(pre_tokenizers.ByteLevel(add_prefix_space=False)),
    "byte-level llama-3": lambda: _byte_level(_LLAMA_3),
    "byte-tokens llama-2": lambda: _with_byte_tokens(
        [_SPACE, decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)],
        normalizer=_PREPEND,
    ),
    "byte-tokens gemma": lambda: _with_byte_tokens(
        [_SPACE, decoders.ByteFallback(), decoders.Fuse()], normalizer=normalizers.Replace(" ", "▁")
    ),
    "byte-tokens metaspace": lambda: _with_byte_tokens(
        [decoders.ByteFallback(), decoders.Metaspace()], pre_tokenizer=pre_tokenizers.Metaspace()
    ),
    "unigram": _unigram,
    "word-piece": _word_piece,
    "words": _words,
    "suffixes": _suffixes,
    "letters": _letters,
}


@cache
def trained(kind: str) -> Tokenizer:
    return Tokenizer({"tokenizer.json": TRAINED[kind]().to_str().encode()}, kind)
