"""The two matrices of each module that an adapter changes, read from adapter_model.safetensors.

Names are those of the model's entries. Whether the model has such modules, of these shapes, is
found when they are merged.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
import xxhash
from safetensors import safe_open
from torch import Tensor

from nanocore.protocol.errors import ModelFileError
from nanocore.worker.loading.checkpoint import StoredTensor, quoted, read_header
from nanocore.worker.loading.lora.adapter_config import (
    CONFIG_FILE,
    AdapterConfig,
    missing_adapter,
    read_adapter_config,
)
from nanocore.worker.loading.weights import TensorNames, is_finite

_FILE: Final = "adapter_model.safetensors"
_OLD_FILE: Final = "adapter_model.bin"
_PREFIX: Final = "base_model.model."
_ENDS: Final = (".lora_A.weight", ".lora_B.weight")
_FLOATS: Final = ("F32", "F16", "BF16")
_BASE: Final = ".base_layer.weight"
_EXPERTS: Final = (".experts.", ".mlp.experts")


@dataclass(frozen=True, slots=True)
class LowRank:
    """What is added to a weight [O, I]: scale * B A.

    where: the file and the module, as messages name them. base: the weight itself, as PEFT saves
    that of a head beside its adapter.
    """

    a_RI: Tensor
    b_OR: Tensor
    scale: float
    where: str
    base: StoredTensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """Of the weight."""
        return self.b_OR.shape[0], self.a_RI.shape[1]

    def add_to(self, weight: Tensor, rows: slice, columns: slice) -> None:
        """Add these rows and columns of it to float32 weights in place.

        Raises:
            ModelFileError: the adapter comes with a weight, and it is another one.
        """
        if self.base is not None:
            with safe_open(self.base.path, framework="pt") as file:
                base = file.get_slice(self.base.name)[rows, columns]
            if not torch.equal(weight.to(base.dtype).cpu(), base):
                raise ModelFileError(
                    f"{self.where} comes with a base_layer.weight that is not the model's: the "
                    "adapter is of another model, or changed it: merge it with PEFT "
                    "(merge_and_unload, save_pretrained) and load the result"
                )
        b, a = (x.to(weight) for x in (self.b_OR[rows], self.a_RI[:, columns]))
        weight.addmm_(b, a, alpha=self.scale)


@dataclass(frozen=True, slots=True)
class Adapter:
    """One adapter. modules: by projections' names. digest: of both its files."""

    folder: Path
    modules: dict[str, LowRank]
    digest: bytes


def read_adapter(folder: Path, names: TensorNames) -> Adapter:
    """The adapter in a folder, as PEFT writes it. names: from the model's files to its entries.

    Raises:
        ModelFileError: a file is missing or damaged; the adapter is of a kind that is not merged,
            or contradicts itself.
    """
    if not (folder / CONFIG_FILE).exists():
        raise missing_adapter(folder)
    config = read_adapter_config(folder)
    path = folder / _FILE
    if not path.exists() and (folder / _OLD_FILE).exists():
        raise ModelFileError(
            f"{folder} has {_OLD_FILE}, which is not read: load it with PEFT and call "
            "save_pretrained(folder, safe_serialization=True)"
        )
    modules = {}
    pairs = _pairs(path, config)
    with safe_open(path, framework="pt") as file:
        for module, (a, b, base) in pairs.items():
            name = (names(f"{module}.weight") or f"{module}.weight").removesuffix(".weight")
            where = f"{path}: module {quoted(module)}"
            a_RI, b_OR = file.get_tensor(a.name), file.get_tensor(b.name)
            if not (is_finite(a_RI) and is_finite(b_OR)):
                raise ModelFileError(f"{where} has NaN or infinity: download the adapter again")
            modules[name] = LowRank(a_RI, b_OR, config.scale_of(module), where, base)
    digest = xxhash.xxh3_128()
    for stored in (folder / CONFIG_FILE, path):
        digest.update(stored.read_bytes())
    return Adapter(folder, modules, digest.digest())


def _pairs(
    path: Path, config: AdapterConfig
) -> dict[str, tuple[StoredTensor, StoredTensor, StoredTensor | None]]:
    """A, B and perhaps the weight of each module, by the name that the model's files have."""
    tensors = {tensor.name: tensor for tensor in read_header(path)}
    pairs = {}
    bases = {name: tensors.pop(name) for name in list(tensors) if _is_base(name, tensors)}
    for name in sorted(tensors):
        where = f"{path}: tensor {quoted(name)}"
        if not name.startswith(_PREFIX) or not name.endswith(_ENDS):
            raise ModelFileError(
                f"{where} is not merged: only lora_A and lora_B of linear layers are"
            )
        module = name.removeprefix(_PREFIX).removesuffix(_ENDS[0]).removesuffix(_ENDS[1])
        if any(word in f".{module}" for word in _EXPERTS):
            raise ModelFileError(
                f"{where} is of experts, which are not merged: merge it with PEFT "
                "(merge_and_unload, save_pretrained) and load the result"
            )
        if not config.targets(module):
            raise ModelFileError(
                f"{where} is not among the target_modules of {CONFIG_FILE}: the files are not of "
                "the same adapter; download both again"
            )
        a, b = (tensors.get(f"{_PREFIX}{module}{end}") for end in _ENDS)
        if a is None or b is None:
            raise ModelFileError(f"{where} has no counterpart {_ENDS[a is not None][1:7]}")
        _check_pair(a, b, config.rank_of(module))
        pairs[module] = (a, b, bases.get(f"{_PREFIX}{module}{_BASE}"))
    if not pairs:
        raise ModelFileError(f"{path} has no tensors")
    return pairs


def _is_base(name: str, tensors: Mapping[str, StoredTensor]) -> bool:
    """Whether it is the weight of a module that the adapter changes."""
    return name.endswith(_BASE) and name.removesuffix(_BASE) + _ENDS[0] in tensors


def _check_pair(a: StoredTensor, b: StoredTensor, rank: int) -> None:
    for tensor, axis in ((a, 0), (b, 1)):
        where = f"{tensor.path}: tensor {quoted(tensor.name)}"
        if tensor.dtype not in _FLOATS:
            raise ModelFileError(f"{where} is {tensor.dtype}; one of {', '.join(_FLOATS)} is read")
        if len(tensor.shape) != 2 or tensor.shape[axis] != rank:
            raise ModelFileError(
                f"{where} has shape {list(tensor.shape)}, and {CONFIG_FILE} says that its rank is "
                f"{rank}: the files are not of the same adapter; download both again"
            )
