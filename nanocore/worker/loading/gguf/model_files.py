"""The files that clients need of a GGUF model, made of its metadata as if they lay in a folder.

A tokenizer.json beside the model's file comes before the one that would be made, once it is known
to be of this vocabulary; so models are served whose pre-tokenizer is not known here.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import msgspec

from nanocore.protocol.errors import ModelFileError
from nanocore.worker.config.json_file import read_json
from nanocore.worker.loading.gguf.files import read_headers
from nanocore.worker.loading.gguf.settings import generation_settings
from nanocore.worker.loading.gguf.tokenizer_json import adds_bos, make_tokenizer_json
from nanocore.worker.loading.gguf.vocabulary import TokenType, Vocabulary

logger = logging.getLogger(__name__)

_MAX_TOKENIZER_BYTES = 64 * 2**20


def gguf_model_files(first: Path) -> dict[str, bytes]:
    """Contents by name; none of a model that has no vocabulary.

    Raises:
        ModelFileError: its vocabulary is damaged, or of a kind that is not served.
    """
    if "tokenizer.ggml.model" not in read_headers(first)[0].metadata:
        return {}
    vocabulary = Vocabulary.read(first)
    generation = generation_settings(first).values
    return {
        "tokenizer.json": tokenizer_json(first, vocabulary),
        "tokenizer_config.json": msgspec.json.encode(_tokenizer_config(vocabulary)),
        "generation_config.json": msgspec.json.encode(generation),
    }


def tokenizer_json(first: Path, vocabulary: Vocabulary | None = None) -> bytes:
    """Of these alone. Raises ModelFileError as `gguf_model_files`."""
    vocabulary = vocabulary or Vocabulary.read(first)
    beside = first.with_name("tokenizer.json")
    if not beside.exists():
        return make_tokenizer_json(vocabulary)
    _check_fits(beside, vocabulary)
    logger.info("%s is used in place of the vocabulary of %s", beside, first.name)
    return beside.read_bytes()


def _check_fits(beside: Path, vocabulary: Vocabulary) -> None:
    """That it gives tokens the ids that they have here."""
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


def _tokenizer_config(vocabulary: Vocabulary) -> dict[str, Any]:
    """Names of special tokens, and the chat template."""
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
