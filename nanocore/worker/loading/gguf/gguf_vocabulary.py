"""A GGUF model's tokens, and what it says of them: checked, before a tokenizer is made of them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any, Final

from nanocore.protocol.errors import ModelFileError, quoted
from nanocore.worker.config.json_settings import Settings
from nanocore.worker.loading.gguf.header import read_vocabulary

_MAX_TOKEN_CHARS: Final = 1024
_MAX_CHARS: Final = 2**24
"""Limit for all tokens together: eight times the largest vocabulary."""
_ENDS: Final = frozenset(
    {
        "<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>",
        "<|end_of_text|>", "<EOT>", "</s>", "<eos>",
    }
)  # fmt: skip
"""Control tokens that end a response whatever the file says, as in llama.cpp: files name one, and
many models have two."""

_NO_TOKEN: Final = 2**32 - 1
"""An id that stands for none."""


class TokenType(IntEnum):
    """Kinds of tokens, as llama.cpp numbers them."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True, slots=True)
class GgufVocabulary:
    """tokens, types, scores: by id; merges: "left right". ids: special tokens' ids by name ("bos").

    model: kind of tokenizer. pre: how text is split before it. add_bos, add_eos, add_space_prefix:
    None where the file does not say. templates: of chats, by name.
    """

    path: Path
    architecture: str
    model: str
    pre: str
    tokens: list[str]
    types: list[int]
    scores: list[float]
    merges: list[str]
    ids: dict[str, int]
    add_bos: bool | None
    add_eos: bool | None
    add_space_prefix: bool | None
    templates: dict[str, str]

    @classmethod
    def read(cls, path: Path) -> GgufVocabulary:
        """A file's. Raises ModelFileError: it is damaged."""
        said = Settings(path, read_vocabulary(path))
        tokens = said.get("tokenizer.ggml.tokens", list[str], [])
        _check_tokens(path, tokens)
        ids = {
            name: said.get(f"tokenizer.ggml.{key}_token_id", int, -1)
            for name, key in (
                ("bos", "bos"), ("eos", "eos"), ("eot", "eot"), ("eom", "eom"),
                ("unk", "unknown"), ("pad", "padding"),
            )
        }  # fmt: skip
        for name in ("eos", "eot", "eom"):
            if ids[name] >= len(tokens) and ids[name] != _NO_TOKEN:
                raise ModelFileError(
                    f"{path}: tokenizer.ggml.{name}_token_id = {ids[name]} is not among its "
                    f"{len(tokens)} tokens: a text would never end; download it again"
                )
        normal = [int(TokenType.NORMAL)] * len(tokens)
        types = said.get("tokenizer.ggml.token_type", list[int], normal)
        model = said.get("tokenizer.ggml.model", str, "")
        unscored = [0.0] * (0 if model == "llama" else len(tokens))
        scores = said.get("tokenizer.ggml.scores", list[float], unscored)
        if not len(tokens) == len(types) == len(scores):
            raise ModelFileError(
                f"{path}: tokenizer.ggml has {len(tokens)} tokens, {len(types)} types and "
                f"{len(scores)} scores: it is damaged, download it again"
            )
        return cls(
            path=path,
            architecture=said.get("general.architecture", str, ""),
            model=model,
            pre=said.get("tokenizer.ggml.pre", str, ""),
            tokens=tokens,
            types=types,
            scores=scores,
            merges=said.get("tokenizer.ggml.merges", list[str], []),
            ids={name: i for name, i in ids.items() if 0 <= i < len(tokens)},
            add_bos=said.get("tokenizer.ggml.add_bos_token", bool, None),
            add_eos=said.get("tokenizer.ggml.add_eos_token", bool, None),
            add_space_prefix=said.get("tokenizer.ggml.add_space_prefix", bool, None),
            templates=_templates(said.values),
        )


def end_token_ids(vocabulary: GgufVocabulary) -> list[int]:
    """Tokens that end a text, the file's own first."""
    named = [vocabulary.ids[name] for name in ("eos", "eot", "eom") if name in vocabulary.ids]
    pairs = zip(vocabulary.tokens, vocabulary.types, strict=True)
    known = [i for i, (t, kind) in enumerate(pairs) if kind == TokenType.CONTROL and t in _ENDS]
    return list(dict.fromkeys(named + known))


def _check_tokens(path: Path, tokens: list[str]) -> None:
    longest = max(tokens, key=len, default="")
    num_chars = sum(map(len, tokens))
    if len(longest) > _MAX_TOKEN_CHARS or num_chars > _MAX_CHARS:
        raise ModelFileError(
            f"{path}: tokenizer.ggml.tokens have {num_chars} characters, and one has "
            f"{len(longest)}: at most {_MAX_CHARS} and {_MAX_TOKEN_CHARS} are read"
        )
    texts = [token for token in tokens if token]
    if len(set(texts)) < len(texts):
        seen: set[str] = set()
        twice = next(token for token in texts if token in seen or seen.add(token))  # type: ignore[func-returns-value]
        raise ModelFileError(
            f"{path}: the token {quoted(twice)} occurs twice in tokenizer.ggml.tokens"
        )


def _templates(values: dict[str, Any]) -> dict[str, str]:
    prefix = "tokenizer.chat_template."
    found = {key.removeprefix(prefix): v for key, v in values.items() if key.startswith(prefix)}
    found["default"] = values.get("tokenizer.chat_template")
    return {name: text for name, text in found.items() if isinstance(text, str)}
