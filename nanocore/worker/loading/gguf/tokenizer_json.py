"""A tokenizer.json made of a GGUF model's vocabulary, as its makers' own file would cut text.

Two kinds are served: byte-level BPE, by the name of its pre-tokenizer, and SentencePiece's BPE with
scores, whose merges follow from them. `tokenizers` reads it once, so that what is damaged is an
error here.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec
import tokenizers

from nanocore.protocol.errors import ModelFileError, shorten
from nanocore.worker.loading.gguf.pre_tokenizers import PRE_TOKENIZERS, PreTokenizer
from nanocore.worker.loading.gguf.vocabulary import TokenType, Vocabulary

_SPACE: Final = "\u2581"
_REMEDY: Final = "put the model's own tokenizer.json beside it"
_PHI_3_UNSTRIPPED: Final = ("<unk>", "<s>", "<|endoftext|>")
"""Special tokens of Phi-3 that do not take white space behind them along, as all others do."""


def make_tokenizer_json(vocabulary: Vocabulary) -> bytes:
    """The content of the file.

    Raises:
        ModelFileError: a kind of tokenizer that is not served, or a damaged one.
    """
    match vocabulary.model:
        case "gpt2":
            content = _byte_level(vocabulary)
        case "llama":
            content = _sentencepiece(vocabulary)
        case kind:
            raise ModelFileError(
                f"{vocabulary.path}: tokenizer.ggml.model = {shorten(repr(kind))} is not served; "
                f"known: gpt2, llama: {_REMEDY}"
            )
    data = msgspec.json.encode(content)
    try:
        tokenizers.Tokenizer.from_buffer(data)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # the library's are bare Exceptions, or a panic of Rust
        raise ModelFileError(
            f"{vocabulary.path}: its vocabulary makes no tokenizer ({shorten(str(error))}): "
            f"{_REMEDY}"
        ) from None
    return data


def adds_bos(vocabulary: Vocabulary) -> bool:
    """Whether texts begin with BOS; where a file does not say, it is the kind's habit."""
    if vocabulary.add_bos is not None:
        return vocabulary.add_bos
    if vocabulary.model == "llama":
        return True
    pre = PRE_TOKENIZERS.get(vocabulary.pre)
    return pre is not None and pre.adds_bos


def _byte_level(vocabulary: Vocabulary) -> dict[str, Any]:
    pre = _pre_tokenizer(vocabulary)
    merges = [_pair(vocabulary, merge) for merge in vocabulary.merges]
    return {
        **_common(vocabulary),
        "normalizer": {"type": "NFC"} if pre.is_composed else None,
        "pre_tokenizer": pre.settings(),
        "decoder": {
            "type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False,
            "use_regex": False,
        },
        "model": _model(vocabulary, merges) | {"ignore_merges": pre.ignores_merges},
    }  # fmt: skip


def _pre_tokenizer(vocabulary: Vocabulary) -> PreTokenizer:
    pre = PRE_TOKENIZERS.get(vocabulary.pre)
    if pre is None:
        raise ModelFileError(
            f"{vocabulary.path}: tokenizer.ggml.pre = {shorten(repr(vocabulary.pre))} is a way to "
            f"split text that is not served; known: {', '.join(PRE_TOKENIZERS)}: {_REMEDY}"
        )
    return pre


def _pair(vocabulary: Vocabulary, merge: str) -> tuple[str, str]:
    end = merge.find(" ", 1) if isinstance(merge, str) else -1
    if end < 0:
        raise ModelFileError(
            f"{vocabulary.path}: tokenizer.ggml.merges has {shorten(repr(merge))}, which is no pair"
        )
    return merge[:end], merge[end + 1 :]


def _sentencepiece(vocabulary: Vocabulary) -> dict[str, Any]:
    has_prefix = vocabulary.add_space_prefix is not False
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    steps = [{"type": "Prepend", "prepend": _SPACE}] if has_prefix else []
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if has_prefix else []
    unknown = vocabulary.ids.get("unk")
    return {
        **_common(vocabulary),
        "normalizer": {"type": "Sequence", "normalizers": [*steps, replace]},
        "pre_tokenizer": None,
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
                {"type": "ByteFallback"}, {"type": "Fuse"}, *strip,
            ],
        },
        "model": _model(vocabulary, _merges(vocabulary))
        | {
            "unk_token": None if unknown is None else vocabulary.tokens[unknown],
            "fuse_unk": True,
            "byte_fallback": True,
        },
    }  # fmt: skip


def _merges(vocabulary: Vocabulary) -> list[tuple[str, str]]:
    """Every way to put a token together of two, the best tokens' first."""
    triples = zip(vocabulary.tokens, vocabulary.types, vocabulary.scores, strict=True)
    scores = {token: score for token, kind, score in triples if kind == TokenType.NORMAL}
    found = [
        (-score, -cut, token[:cut], token[cut:])
        for token, score in scores.items()
        for cut in range(1, len(token))
        if token[:cut] in scores and token[cut:] in scores
    ]
    found.sort(key=lambda merge: merge[:2])
    return [(left, right) for _, _, left, right in found]


def _model(vocabulary: Vocabulary, merges: list[tuple[str, str]]) -> dict[str, Any]:
    pairs = zip(vocabulary.tokens, vocabulary.types, strict=True)
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        # Added tokens too: `tokenizers` then leaves them their ids.
        "vocab": {
            token: i for i, (token, kind) in enumerate(pairs) if token and kind != TokenType.UNUSED
        },
        "merges": merges,
    }


def _common(vocabulary: Vocabulary) -> dict[str, Any]:
    strips = vocabulary.architecture == "phi3" and vocabulary.model == "llama"
    special = (TokenType.CONTROL, TokenType.UNKNOWN)
    pairs = zip(vocabulary.tokens, vocabulary.types, strict=True)
    added = [
        {
            "id": i,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": strips and kind == TokenType.CONTROL and token not in _PHI_3_UNSTRIPPED,
            "normalized": False,
            "special": kind in special,
        }
        for i, (token, kind) in enumerate(pairs)
        if token and kind in (*special, TokenType.USER_DEFINED)
    ]
    before = [vocabulary.ids["bos"]] if adds_bos(vocabulary) and "bos" in vocabulary.ids else []
    after = [vocabulary.ids["eos"]] if vocabulary.add_eos and "eos" in vocabulary.ids else []
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "post_processor": _template(vocabulary, before, after) if before or after else None,
    }


def _template(vocabulary: Vocabulary, before: list[int], after: list[int]) -> dict[str, Any]:
    def piece(token_id: int, sequence: int) -> dict[str, Any]:
        return {"SpecialToken": {"id": vocabulary.tokens[token_id], "type_id": sequence}}

    def around(name: str, sequence: int) -> list[dict[str, Any]]:
        text = {"Sequence": {"id": name, "type_id": sequence}}
        return [
            *(piece(i, sequence) for i in before), text, *(piece(i, sequence) for i in after)
        ]  # fmt: skip

    texts = {vocabulary.tokens[i]: i for i in (*before, *after)}
    return {
        "type": "TemplateProcessing",
        "single": around("A", 0),
        "pair": [*around("A", 0), *around("B", 1)],
        "special_tokens": {
            text: {"id": text, "ids": [i], "tokens": [text]} for text, i in texts.items()
        },
    }
