"""What a checkpoint's files hold of a module, where that is known.

Whether a module is quantized is asked of the files first: tools write lists of what they left alone
in several ways, some of them wrong. Without files (dummy weights) the lists decide.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

import torch

from nanocore.worker.loading.checkpoint import StoredTensor

_FLOATS: Final = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_EMBEDDING: Final = "embed_tokens"
_FUSED: Final = {
    "q_proj": "qkv_proj",
    "k_proj": "qkv_proj",
    "v_proj": "qkv_proj",
    "gate_proj": "gate_up_proj",
    "up_proj": "gate_up_proj",
}
"""Names that engines have for stacked projections, and write into lists."""


@dataclass(frozen=True, slots=True)
class StoredTensors:
    """Tensors of a checkpoint by the names that models have for them; None: not known."""

    by_name: Mapping[str, StoredTensor] | None = None
    ends: frozenset[str] = field(init=False)
    """What follows the modules' names."""

    def __post_init__(self) -> None:
        ends = frozenset(name.rpartition(".")[2] for name in self.by_name or ())
        object.__setattr__(self, "ends", ends)

    @property
    def is_known(self) -> bool:
        """Whether there are files."""
        return self.by_name is not None

    def has(self, name: str) -> bool:
        """Whether the files hold it."""
        return self.by_name is not None and name in self.by_name

    def dtype(self, name: str) -> str | None:
        """Of a tensor, as safetensors spells it; None if it is not there."""
        return self.by_name[name].dtype if self.by_name and name in self.by_name else None

    def float_dtype(self, name: str, default: torch.dtype) -> torch.dtype:
        """The dtype of a tensor of floats; the default if it is not there, or of others."""
        return _FLOATS.get(self.dtype(name) or "", default)

    def shape(self, name: str, *served: tuple[int, ...]) -> tuple[int, ...]:
        """The tensor's shape if it is one of those served, else the first of them."""
        if self.by_name is not None and name in self.by_name:
            shape = self.by_name[name].shape
            return shape if shape in served else served[0]
        return served[0]


def aliases(name: str) -> tuple[str, ...]:
    """A module's name, and that of the stacked one that it is a part of."""
    parent, _, last = name.rpartition(".")
    return (name, f"{parent}.{_FUSED[last]}") if last in _FUSED else (name,)


def is_inner(name: str) -> bool:
    """Whether a module lies between the embedding and the head."""
    return name.rpartition(".")[2] not in (_EMBEDDING, "lm_head")
