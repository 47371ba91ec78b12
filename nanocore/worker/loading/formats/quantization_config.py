"""Readers that formats share: of `quantization_config`, and of the files' tensors.

Whether a module is quantized is decided by the files alone: the lists of modules that tools left
unquantized (`ignore`, `modules_to_not_convert`, `lm_head`) are of several kinds, and some are
wrong.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, TypeVar

import torch

from nanocore.worker.config.json_settings import MAX_SIZE, Range, Settings
from nanocore.worker.loading.checkpoint import CheckpointTensor
from nanocore.worker.loading.formats.packed_groups import MIN_GROUP
from nanocore.worker.loading.weights import FLOATS

T = TypeVar("T", int, str, bool)


def group_size(settings: Settings) -> int:
    """Inputs that share a scale, -1 for all; required.

    Raises ModelFileError: no group has such a size.
    """
    name = "group_size"
    size = settings.required(name, int)
    if size == -1:
        return size
    settings.within(name, size, Range(MIN_GROUP, MAX_SIZE))
    if size % MIN_GROUP:
        raise settings.error(name, f"must be -1 or a multiple of {MIN_GROUP}")
    return size


def groups_in_words(size: int) -> str:
    return "a scale for each output" if size == -1 else f"groups of {size} inputs"


def refuse_unless(
    settings: Settings, name: str, kind: type[T], served: Sequence[T], *, required: bool = False
) -> T:
    """A setting that has one of the values served, the first where it is absent or null.

    Raises ModelFileError: it has another, or is missing and required.
    """
    value = settings.required(name, kind) if required else settings.get(name, kind, served[0])
    if value not in served:
        known = " or ".join(str(known) for known in served)
        raise settings.error(name, f"is not served: {known} is")
    return value


def refuse_if_set(settings: Settings, *names: str) -> None:
    """Raises ModelFileError: one of these is there and neither null, false nor empty."""
    for name in names:
        if settings.has(name) and settings.values[name] not in (False, {}, []):
            raise settings.error(name, "is not implemented")


_FUSED: Final = {
    "q_proj": "qkv_proj",
    "k_proj": "qkv_proj",
    "v_proj": "qkv_proj",
    "gate_proj": "gate_up_proj",
    "up_proj": "gate_up_proj",
}
"""Names that engines have for stacked projections, and that rules may name."""


class CheckpointTensors:
    """Tensors of a checkpoint by the names that models have for them.

    ends: what follows the modules' names.
    """

    def __init__(self, by_name: Mapping[str, CheckpointTensor]) -> None:
        self.by_name = by_name
        self.ends = frozenset(name.rpartition(".")[2] for name in by_name)

    def has(self, name: str) -> bool:
        """Whether the files hold it."""
        return name in self.by_name

    def dtype(self, name: str) -> str | None:
        return self.by_name[name].dtype if self.has(name) else None

    def float_dtype(self, name: str, default: torch.dtype) -> torch.dtype:
        """The dtype of a tensor of floats; the default if it is not there, or of others."""
        return FLOATS.get(self.dtype(name) or "", default)

    def shape(self, name: str, *served: tuple[int, ...]) -> tuple[int, ...]:
        """The tensor's shape if it is one of those served, else the first of them."""
        shape = self.by_name[name].shape if self.has(name) else served[0]
        return shape if shape in served else served[0]


def aliases(name: str) -> tuple[str, ...]:
    """A module's name, and that of the stacked one that it is a part of."""
    parent, _, last = name.rpartition(".")
    return (name, f"{parent}.{_FUSED[last]}") if last in _FUSED else (name,)
