"""What a checkpoint's files hold of a module.

Whether a module is quantized is asked of the files alone: the lists that tools write of what they
left alone (`ignore`, `modules_to_not_convert`, `lm_head`) are of several kinds, and some are wrong.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

import torch

from nanocore.worker.loading.checkpoint import StoredTensor

_FLOATS: Final = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_FUSED: Final = {
    "q_proj": "qkv_proj",
    "k_proj": "qkv_proj",
    "v_proj": "qkv_proj",
    "gate_proj": "gate_up_proj",
    "up_proj": "gate_up_proj",
}
"""Names that engines have for stacked projections, and that rules may name."""


@dataclass(frozen=True, slots=True)
class StoredTensors:
    """Tensors of a checkpoint by the names that models have for them."""

    by_name: Mapping[str, StoredTensor]
    ends: frozenset[str] = field(init=False)
    """What follows the modules' names."""

    def __post_init__(self) -> None:
        ends = frozenset(name.rpartition(".")[2] for name in self.by_name)
        object.__setattr__(self, "ends", ends)

    def has(self, name: str) -> bool:
        """Whether the files hold it."""
        return name in self.by_name

    def dtype(self, name: str) -> str | None:
        """Of a tensor, as safetensors spells it; None if it is not there."""
        return self.by_name[name].dtype if self.has(name) else None

    def float_dtype(self, name: str, default: torch.dtype) -> torch.dtype:
        """The dtype of a tensor of floats; the default if it is not there, or of others."""
        return _FLOATS.get(self.dtype(name) or "", default)

    def shape(self, name: str, *served: tuple[int, ...]) -> tuple[int, ...]:
        """The tensor's shape if it is one of those served, else the first of them."""
        shape = self.by_name[name].shape if self.has(name) else served[0]
        return shape if shape in served else served[0]


def aliases(name: str) -> tuple[str, ...]:
    """A module's name, and that of the stacked one that it is a part of."""
    parent, _, last = name.rpartition(".")
    return (name, f"{parent}.{_FUSED[last]}") if last in _FUSED else (name,)
