"""Weights from safetensors files into a model's parameters: strict, in place, one tensor at a time.

A model says which checkpoint tensor goes to which view of its parameters (`slots`); the loader
fills every slot exactly once and accepts nothing else. safetensors rejects damaged files but names
none, so every error here names the file, and the tensor and shapes where there are any.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
from safetensors import SafetensorError, safe_open
from torch import Tensor

from nanocore.protocol.errors import ModelFileError

INDEX_FILE = "model.safetensors.index.json"
_LFS_MAGIC = b"version https://git-lfs"


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


def load_weights(folder: Path, slots: dict[str, Tensor], ignored: frozenset[str]) -> int:
    """Fill all slots from the folder's safetensors files; returns the bytes read.

    Args:
        folder: single `model.safetensors`, or an index with its shards.
        slots: views of parameters, by checkpoint tensor name, each with that tensor's shape.
        ignored: names that may be present and are not needed (a tied lm_head).

    Raises:
        ModelFileError: a file is missing, damaged or no safetensors; a tensor is missing,
            unexpected, repeated or of another shape.
    """
    filled: dict[str, Path] = {}
    num_bytes = 0
    for path in _weight_files(folder):
        for name, tensor in _tensors(path):
            if name in ignored:
                continue
            if name not in slots:
                raise ModelFileError(f"{path}: tensor {name!r} is not part of this model")
            if name in filled:
                raise ModelFileError(f"{path}: tensor {name!r} is also in {filled[name]}")
            target = slots[name]
            if tensor.shape != target.shape:
                raise ModelFileError(
                    f"{path}: tensor {name!r} has shape {list(tensor.shape)}, config.json implies "
                    f"{list(target.shape)}"
                )
            target.copy_(tensor)
            filled[name] = path
            num_bytes += tensor.nbytes
    missing = sorted(slots.keys() - filled.keys())
    if missing:
        raise ModelFileError(
            f"{folder}: {len(missing)} of {len(slots)} tensors are missing, e.g. {missing[0]!r}"
        )
    return num_bytes


def _weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a model folder, in a fixed order."""
    index = folder / INDEX_FILE
    if not index.exists():
        return [folder / "model.safetensors"]
    try:
        shards = msgspec.json.decode(index.read_bytes(), type=_Index).weight_map.values()
    except (OSError, msgspec.DecodeError) as error:
        raise ModelFileError(f"{index}: {error}") from None
    for shard in shards:
        if Path(shard).name != shard:
            raise ModelFileError(f"{index}: shard {shard!r} is not a file name in this folder")
    return [folder / shard for shard in sorted(set(shards))]


def _tensors(path: Path) -> Iterator[tuple[str, Tensor]]:
    try:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 (safe_open is no mapping)
                yield name, file.get_tensor(name)
    except FileNotFoundError:
        raise ModelFileError(f"{path} is missing") from None
    except (SafetensorError, OSError) as error:
        raise ModelFileError(f"{path} ({_describe(path)}): {error}") from None


def _describe(path: Path) -> str:
    with path.open("rb") as file:
        head = file.read(len(_LFS_MAGIC))
    if head == _LFS_MAGIC:
        return "a git-lfs pointer, not the weights: run `git lfs pull` in the model's repository"
    return f"{path.stat().st_size} bytes; damaged, or its download was not completed"
