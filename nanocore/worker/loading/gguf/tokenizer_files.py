"""The tokenizer files that clients need of a GGUF model, made of its metadata.

Two kinds are served: byte-level BPE, by the name of its pre-tokenizer, and SentencePiece's BPE with
scores, from which the merges follow. A GGUF file has no regular expression, only a name; a name
that is not in `PRE_TOKENIZERS` is refused, because another split gives tokens that the model was
not trained on. A tokenizer.json beside the model's file goes before the one that would be made, if
it has this vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from nanocore.protocol.errors import ModelFileError, shorten
from nanocore.worker.config.json_settings import read_json
from nanocore.worker.loading.gguf.gguf_config import generation_values
from nanocore.worker.loading.gguf.gguf_files import read_headers
from nanocore.worker.loading.gguf.gguf_vocabulary import GgufVocabulary, TokenType

_MAX_TOKENIZER_BYTES = 64 * 2**20


def convert_model_files(first: Path) -> dict[str, bytes]:
    """Make the contents by name; none of a model that has no vocabulary.

    Raises ModelFileError: its vocabulary is damaged, or of a kind that is not served.
    """
    if "tokenizer.ggml.model" not in read_headers(first)[0].metadata:
        return {"generation_config.json": msgspec.json.encode(generation_values(first, None))}
    vocabulary = GgufVocabulary.read(first)
    beside = tokenizer_beside(first)
    if beside is not None:
        _check_fits(beside, vocabulary)
    content = make_tokenizer_json(vocabulary) if beside is None else beside.read_bytes()
    return {
        "tokenizer.json": content,
        "tokenizer_config.json": msgspec.json.encode(_tokenizer_config(vocabulary)),
        "generation_config.json": msgspec.json.encode(generation_values(first, vocabulary)),
    }


def tokenizer_beside(first: Path) -> Path | None:
    """Return the tokenizer.json that goes before the vocabulary of a model's file."""
    beside = first.with_name("tokenizer.json")
    return beside if beside.exists() else None


def _check_fits(beside: Path, vocabulary: GgufVocabulary) -> None:
    model = read_json(beside, dict[str, Any], _MAX_TOKENIZER_BYTES).get("model")
    ids = model.get("vocab") if isinstance(model, dict) else None
    if not isinstance(ids, dict):
        raise ModelFileError(f"{beside}: no vocabulary with ids; remove it, or download it again")
    for i, (token, kind) in enumerate(zip(vocabulary.tokens, vocabulary.types, strict=True)):
        if kind == TokenType.NORMAL and ids.get(token) != i:
            raise ModelFileError(
                f"{beside}: token {token!r:.80} is {ids.get(token)}, and {i} in "
                f"{vocabulary.path.name}: it is of another model, remove it"
            )


def _tokenizer_config(vocabulary: GgufVocabulary) -> dict[str, Any]:
    names = {
        f"{name}_token": vocabulary.tokens[vocabulary.ids[name]]
        for name in ("bos", "eos", "unk", "pad")
        if name in vocabulary.ids
    }
    templates: Any = vocabulary.templates.get("default")
    if set(vocabulary.templates) - {"default"}:
        templates = [{"name": n, "template": t} for n, t in vocabulary.templates.items()]
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **names,
        "add_bos_token": adds_bos(vocabulary),
        "clean_up_tokenization_spaces": False,
        **({"chat_template": templates} if templates else {}),
    }


_SPACE: Final = "\u2581"
_REMEDY: Final = "put the model's own tokenizer.json beside it"
_PHI_3_UNSTRIPPED: Final = ("<unk>", "<s>", "<|endoftext|>")
"""Special tokens of Phi-3 that do not take white space behind them along, as all others do."""


def make_tokenizer_json(vocabulary: GgufVocabulary) -> bytes:
    """The content of the file, without what has the format's defaults.

    Raises ModelFileError: a kind of tokenizer that is not served, or a damaged one.
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
    return msgspec.json.encode(content)


def adds_bos(vocabulary: GgufVocabulary) -> bool:
    """Whether texts begin with BOS; where a file does not say, it is the kind's habit."""
    if vocabulary.add_bos is not None:
        return vocabulary.add_bos
    if vocabulary.model == "llama":
        return True
    pre = PRE_TOKENIZERS.get(vocabulary.pre)
    return pre is not None and pre.adds_bos


def _byte_level(vocabulary: GgufVocabulary) -> dict[str, Any]:
    pre = PRE_TOKENIZERS.get(vocabulary.pre)
    if pre is None:
        raise ModelFileError(
            f"{vocabulary.path}: tokenizer.ggml.pre = {shorten(repr(vocabulary.pre))} is an "
            f"unsupported pre-tokenizer; known: {', '.join(PRE_TOKENIZERS)}: {_REMEDY}"
        )
    if not vocabulary.merges:
        raise ModelFileError(f"{vocabulary.path}: tokenizer.ggml.merges is missing: {_REMEDY}")
    known = set(vocabulary.tokens)
    merges = [_pair(vocabulary, merge, known) for merge in vocabulary.merges]
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


def _pair(vocabulary: GgufVocabulary, merge: str, known: set[str]) -> tuple[str, str]:
    end = merge.find(" ", 1)
    if end < 0:
        raise ModelFileError(
            f"{vocabulary.path}: tokenizer.ggml.merges has {shorten(repr(merge))}, which is not a "
            f"pair: {_REMEDY}"
        )
    left, right = merge[:end], merge[end + 1 :]
    for token in (left, right, left + right):
        if token not in known:
            raise ModelFileError(
                f"{vocabulary.path}: its vocabulary does not form a tokenizer: "
                f"tokenizer.ggml.merges has {shorten(repr(merge))}, and {shorten(repr(token))} is "
                f"not among its tokens: {_REMEDY}"
            )
    return left, right


def _sentencepiece(vocabulary: GgufVocabulary) -> dict[str, Any]:
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


def _merges(vocabulary: GgufVocabulary) -> list[tuple[str, str]]:
    """Every way to put a token together of two, the best tokens' first."""
    triples = zip(vocabulary.tokens, vocabulary.types, vocabulary.scores, strict=True)
    scores = {token: score for token, kind, score in triples if kind == TokenType.NORMAL}
    pairs = [
        (left, right)
        for token in sorted(scores, key=scores.__getitem__, reverse=True)
        for cut in range(len(token) - 1, 0, -1)
        if (left := token[:cut]) in scores and (right := token[cut:]) in scores
    ]
    # Of tokens with one score the longest left parts come first, whichever token they are of.
    pairs.sort(key=lambda pair: (scores[pair[0] + pair[1]], len(pair[0])), reverse=True)
    return pairs


def _model(vocabulary: GgufVocabulary, merges: list[tuple[str, str]]) -> dict[str, Any]:
    pairs = zip(vocabulary.tokens, vocabulary.types, strict=True)
    return {
        "type": "BPE",
        # Added tokens too: `tokenizers` then leaves them their ids.
        "vocab": {
            token: i for i, (token, kind) in enumerate(pairs) if token and kind != TokenType.UNUSED
        },
        "merges": merges,
    }


def _common(vocabulary: GgufVocabulary) -> dict[str, Any]:
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
        "added_tokens": added,
        "post_processor": _template(vocabulary, before, after) if before or after else None,
    }


def _template(vocabulary: GgufVocabulary, before: list[int], after: list[int]) -> dict[str, Any]:
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


_CONTRACTIONS: Final = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS: Final = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST: Final = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER: Final = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER: Final = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED: Final = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{{0}}|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{{0}}"
)
_CASED_REST: Final = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"

_LLAMA_3: Final = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_REST}"
_QWEN_2: Final = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}|{_REST}"
_QWEN_35: Final = _QWEN_2.replace(r"\p{L}+", r"[\p{L}\p{M}]+").replace(r"\s\p{L}", r"\s\p{L}\p{M}")
_SEED: Final = (
    rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TEKKEN: Final = _CASED.replace("{0}", "")
_GPT_4O: Final = _CASED.replace("{0}", f"{_CONTRACTIONS}?")


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """pattern: what is cut out; None: GPT-2's, which is built in. has_digits: digits stand alone
    before that. is_composed: text is brought to NFC. ignores_merges: a piece that is a token is
    taken as it is. adds_bos: where the file does not say."""

    pattern: str | None
    has_digits: bool = False
    is_composed: bool = False
    ignores_merges: bool = False
    adds_bos: bool = False

    def settings(self) -> dict[str, Any]:
        steps: list[dict[str, Any]] = []
        if self.has_digits:
            steps.append({"type": "Digits", "individual_digits": True})
        if self.pattern is not None:
            pattern = {"Regex": self.pattern}
            steps.append(
                {"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False}
            )
        bytes_step = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False}
        steps.append(bytes_step | {"use_regex": self.pattern is None})
        return {"type": "Sequence", "pretokenizers": steps}


_LLAMA_BPE: Final = PreTokenizer(_LLAMA_3, ignores_merges=True, adds_bos=True)
_WITH_DIGITS: Final = PreTokenizer(None, has_digits=True)

PRE_TOKENIZERS: Final = {
    "llama-bpe": _LLAMA_BPE,
    "llama-v3": _LLAMA_BPE,
    "llama3": _LLAMA_BPE,
    "lfm2": _LLAMA_BPE,
    "dbrx": PreTokenizer(_LLAMA_3),
    "smaug-bpe": PreTokenizer(_LLAMA_3),
    "qwen2": PreTokenizer(_QWEN_2, is_composed=True),
    "qwen35": PreTokenizer(_QWEN_35, is_composed=True),
    "deepseek-r1-qwen": PreTokenizer(_QWEN_2),
    "gpt-2": PreTokenizer(None),
    "smollm": _WITH_DIGITS,
    "starcoder": _WITH_DIGITS,
    "refact": _WITH_DIGITS,
    "seed-coder": PreTokenizer(_SEED),
    "tekken": PreTokenizer(rf"{_TEKKEN}|\p{{N}}|{_CASED_REST}", ignores_merges=True, adds_bos=True),
    "gpt-4o": PreTokenizer(rf"{_GPT_4O}|\p{{N}}{{1,3}}|{_CASED_REST}"),
}
