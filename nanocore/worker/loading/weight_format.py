"""How a checkpoint stores the weights of linear layers: the wall between layers and formats.

A layer asks the format of its checkpoint, for each projection by its name, which tensors hold the
slice that this rank keeps (`slots`), has them filled, and gives them back for the one internal form
(`unpack`). A format knows nothing of layers, and layers nothing of packings.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from nanocore.kernels.grouped_weight import StoredWeight
from nanocore.worker.loading.weights import Index


@dataclass(frozen=True, slots=True)
class Slot:
    """A tensor of the checkpoint, of which a rank keeps a slice as it is stored.

    shape: of the whole tensor. dtype: the one that it must have. index: what is kept.
    is_exact: False: the file may hold any float, which is converted to dtype.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    index: Index
    is_exact: bool = True


@dataclass(frozen=True, slots=True)
class StoredProjection:
    """One projection's slice in a checkpoint.

    slots: by the tensor's name after the projection's and a dot ("qweight", "scales", ...).
    unpack: what filled slots, by the same names, are a weight [rows, columns] of; it may keep them.
    is_float: that is a tensor of the model's dtype. kept_bytes: memory of the weight where kernels
    keep its numbers, if that is not the slots'.
    """

    slots: Mapping[str, Slot]
    unpack: Callable[[Mapping[str, Tensor]], StoredWeight]
    is_float: bool = False
    kept_bytes: int | None = None


class WeightFormat(Protocol):
    """One checkpoint's way to store weights."""

    @property
    def name(self) -> str:
        """For logs and errors: "awq", "gptq", "compressed-tensors", "fp8", "gguf"."""
        ...

    def projection(
        self, name: str, shape: tuple[int, int], rows: slice, columns: slice
    ) -> StoredProjection | None:
        """How the projection `name` ("model.layers.0.self_attn.q_proj"), a weight of this whole
        shape [O, I], is stored, and the slots of these rows and columns.

        None: as floats, in `{name}.weight`.

        Raises:
            ModelFileError: it is stored in a way that is not served.
            ConfigError: the slice cuts through a group; says which sizes of tensor parallel fit.
        """
        ...
