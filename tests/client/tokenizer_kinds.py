"""Tiny tokenizers of every kind of decoder, and what a text is that any of them decodes."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from nanocore.client.tokenizer import Tokenizer
from tests.client.byte_tokens import SYMBOLS

WORDS = ["▁", "▁▁", "▁a", "b", "▁the", "中", "é", "▁é", "!", "\ufffd", "</w>", "c</w>", "##d", "."]
FIRST_WORD = 3 + 256  # after three special tokens and the bytes


def _with_words(decoder: object) -> tokenizers.Tokenizer:
    """<unk> <s> </s>, a token per byte, and words. `decoder` None: the file has none."""
    vocab = {text: i for i, text in enumerate(["<unk>", "<s>", "</s>"])}
    vocab |= {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
    vocab |= {word: FIRST_WORD + i for i, word in enumerate(WORDS)}
    backend = tokenizers.Tokenizer(models.BPE(vocab, [], byte_fallback=True, unk_token="<unk>"))
    if decoder is not None:
        backend.decoder = decoder
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    backend.add_tokens([" added ", "中文"])
    return backend


def _with_bytes(decoder: object) -> tokenizers.Tokenizer:
    """A token per byte, and some of several: whole characters, halves, and both in one."""
    vocab = {symbol: byte for byte, symbol in SYMBOLS.items()}
    merges = []
    for data in (
        b"ab",
        b" a",
        b"a\xc3",
        b"ab\xe4",
        b"\xe4\xb8",
        b"\xa9b",
        b"\xad\xf0",
        b"\xc3\xa9",
    ):
        left, right = ("".join(SYMBOLS[byte] for byte in part) for part in (data[:-1], data[-1:]))
        if left in vocab:
            merges.append((left, right))
        vocab[left + right] = len(vocab)
    backend = tokenizers.Tokenizer(models.BPE(vocab, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoder
    backend.add_tokens(["é!", "中文", " added "])
    backend.add_special_tokens(["<|end|>", "<s é>"])
    return backend


def _with_sounds(decoder: object) -> tokenizers.Tokenizer:
    """The letters of a model of speech, whose decoder drops repetitions and fillers."""
    tokens = ["<pad>", "<s>", "</s>", "<unk>", "|", "a", "b", "!", ".", "中", "'"]
    vocab = {token: i for i, token in enumerate(tokens)}
    backend = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    backend.decoder = decoder
    backend.add_special_tokens(["<pad>", "<s>", "</s>", "<unk>"])
    return backend


_SPACE = decoders.Replace("▁", " ")
_LLAMA_2 = [_SPACE, decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
KINDS: dict[str, Callable[[], tokenizers.Tokenizer]] = {
    "byte-level": lambda: _with_bytes(decoders.ByteLevel()),
    "llama-2": lambda: _with_words(decoders.Sequence(_LLAMA_2)),
    "gemma": lambda: _with_words(decoders.Sequence(_LLAMA_2[:3])),
    "metaspace": lambda: _with_words(decoders.Metaspace()),
    "metaspace-bytes": lambda: _with_words(
        decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    ),
    "word-piece": lambda: _with_words(decoders.WordPiece()),
    "none": lambda: _with_words(None),
    "suffix": lambda: _with_words(decoders.BPEDecoder()),
    "ctc": lambda: _with_sounds(decoders.CTC(pad_token="<pad>", word_delimiter_token="|")),
    "byte-level-and-more": lambda: _with_bytes(
        decoders.Sequence([decoders.ByteLevel(), decoders.Replace("!", "?")])
    ),
}
FALLBACK = {"llama-2", "gemma", "metaspace-bytes"}


def make(kind: str, folder: Path) -> Tokenizer:
    KINDS[kind]().save(str(folder / "tokenizer.json"))
    return Tokenizer.from_folder(folder)


def has_decoder(folder: Path) -> bool:
    return json.loads((folder / "tokenizer.json").read_text())["decoder"] is not None


def expected_text(
    kind: str, tokenizer: Tokenizer, prompt: Sequence[int], output: Sequence[int], skip: bool
) -> str:
    """What decoding at once adds to the prompt, less a half character at the end.

    Of byte tokens, the U+FFFD that stand for what is no UTF-8 are put in before decoding: the
    decoder itself would replace whole runs of bytes.
    """
    if kind in FALLBACK or kind.startswith("byte-tokens"):
        before = tokenizer.decode(_repaired(tokenizer, prompt, skip), skip)
        whole = tokenizer.decode(_repaired(tokenizer, [*prompt, *output], skip), skip)
        return whole.removeprefix(before)
    if kind.startswith("byte-level"):
        prompt = []  # joined bytes: nothing depends on what was before
    return tokenizer.decode([*prompt, *output], skip).removeprefix(tokenizer.decode(prompt, skip))


def _repaired(tokenizer: Tokenizer, token_ids: Sequence[int], skip: bool) -> list[int]:
    """The ids with every run of byte tokens made UTF-8."""
    vocab = tokenizer.backend.get_vocab()
    utf8 = codecs.getincrementaldecoder("utf-8")("replace")
    repaired: list[int] = []

    def put(characters: str) -> None:
        repaired.extend(vocab[f"<0x{byte:02X}>"] for byte in characters.encode())

    for token_id in token_ids:
        token = tokenizer.backend.id_to_token(token_id) or ""
        if token in ("<unk>", "<s>", "</s>") and skip:
            continue
        if match := re.fullmatch("<0x(..)>", token):
            put(utf8.decode(bytes.fromhex(match[1])))
        elif token:
            put(utf8.decode(b"", final=True))
            utf8.reset()
            repaired.append(token_id)
    if (rest := utf8.decode(b"", final=True)) != "\ufffd":
        put(rest)  # no half character: it can never become one
    return repaired
