"""What a checkpoint's weights say where config.json does not, or says otherwise.

As transformers has it: weights have their own dtype where none is named, and a head that is stored
beside the embedding it should be tied to is used if it is another matrix.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final

from nanocore.protocol.errors import ModelFileError
from nanocore.worker.config.model_config import ModelConfig
from nanocore.worker.loading.checkpoint import StoredTensor, all_tensors
from nanocore.worker.loading.weights import EMBEDDING, HEAD, TensorNames

_DTYPES: Final = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_LAYER: Final = re.compile(r"model\.layers\.(\d{1,9})\.")
_PIECE_BYTES: Final = 4 * 2**20


def as_stored(config: ModelConfig, folder: Path, names: TensorNames) -> ModelConfig:
    """The configuration, with `dtype` and `tie_word_embeddings` as the folder's files are.

    names: from the files' names to the model's.

    Reads headers, and weights only to compare a tied head with the embedding if it is there.

    Raises:
        ModelFileError: see `all_tensors`; or the files have more or fewer layers.
    """
    tensors = all_tensors(folder)
    by_name = {name: tensor for tensor in tensors if (name := names(tensor.name))}
    _check_layers(config, folder, by_name)
    head, embedding = by_name.get(HEAD), by_name.get(EMBEDDING)
    tied = config.tie_word_embeddings and not _has_packed_head(by_name)
    if tied and head is not None and embedding is not None:
        tied = _are_equal(head, embedding)
    return replace(config, dtype=config.dtype or _dtype(by_name), tie_word_embeddings=tied)


def _has_packed_head(names: Iterable[str]) -> bool:
    """Whether the head is stored as a quantized layer, which is never the embedding itself."""
    prefix = f"{HEAD.rpartition('.')[0]}."
    ends = {name.removeprefix(prefix) for name in names if name.startswith(prefix)}
    return not ends <= {"weight", "bias"}


def _check_layers(config: ModelConfig, folder: Path, by_name: Mapping[str, StoredTensor]) -> None:
    """Before anything is made for each layer that config.json asks for."""
    layers = [int(found[1]) for name in by_name if (found := _LAYER.match(name))]
    num_layers = max(layers, default=-1) + 1
    if num_layers != config.num_layers:
        raise ModelFileError(
            f"{folder}: num_hidden_layers is {config.num_layers} in config.json, and the files "
            f"have weights of {num_layers} layers: they are not of the same model"
        )


def _dtype(by_name: Mapping[str, StoredTensor]) -> str:
    """That of most bytes; "" if there are no floats."""
    num_bytes = Counter[str]()
    for tensor in by_name.values():
        if tensor.dtype in _DTYPES:
            num_bytes[_DTYPES[tensor.dtype]] += tensor.num_bytes
    return max(num_bytes, key=lambda dtype: num_bytes[dtype], default="")


def _are_equal(one: StoredTensor, other: StoredTensor) -> bool:
    """Whether two tensors have the same bytes, read piece by piece."""
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    try:
        with one.path.open("rb") as file, other.path.open("rb") as other_file:
            file.seek(one.offset)
            other_file.seek(other.offset)
            for start in range(0, one.num_bytes, _PIECE_BYTES):
                size = min(_PIECE_BYTES, one.num_bytes - start)
                if file.read(size) != other_file.read(size):
                    return False
    except OSError as error:
        raise ModelFileError(f"{one.path}: {error.strerror or error}") from None
    return True
