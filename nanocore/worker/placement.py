"""Where one rank's part of a model lives, and which part that is.

Tensor parallel ranks split every layer (Megatron-LM: Shoeybi et al. 2019): heads, MLP columns and
vocabulary rows are dealt out in order of rank. Pipeline stages split the sequence of layers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Final

import torch
from torch import Tensor

from nanocore.protocol.errors import ConfigError, ModelFileError
from nanocore.worker.communication.communicator import Communicator, SingleRank
from nanocore.worker.loading.weights import WeightFormat

_MAX_TENSOR_BYTES: Final = 2**47
"""What a process can address. Larger ones would overflow in torch, even without memory."""


@dataclass(frozen=True, slots=True)
class Placement:
    """One rank's place.

    dtype: of weights and activations. tp: the ranks that share this rank's layers.
    pp_rank, pp_size: this rank's pipeline stage, and how many there are.
    weight_format: how the checkpoint stores linear layers; None: as floats.
    """

    dtype: torch.dtype
    device: torch.device
    tp: Communicator = SingleRank()
    pp_rank: int = 0
    pp_size: int = 1
    weight_format: WeightFormat | None = None

    @property
    def is_first_stage(self) -> bool:
        return self.pp_rank == 0

    @property
    def is_last_stage(self) -> bool:
        return self.pp_rank == self.pp_size - 1

    def empty(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """A parameter of this rank, not yet filled.

        Raises ModelFileError: no memory could hold it.
        """
        self.check_size(*shape)
        return torch.empty(shape, dtype=dtype or self.dtype, device=self.device)

    def check_size(self, *shape: int) -> None:
        """Raises ModelFileError: no memory could hold a parameter of this shape."""
        if math.prod(shape) * torch.float32.itemsize > _MAX_TENSOR_BYTES:
            raise ModelFileError(
                f"config.json implies a tensor of shape {list(shape)}, which no memory holds: is "
                "it of this model?"
            )

    def on_meta(self) -> Placement:
        """The same part without memory behind it: shapes alone."""
        return replace(self, device=torch.device("meta"))

    def share(self, size: int, what: str) -> int:
        """Share of `size` that each tensor parallel rank has.

        Raises ConfigError: it cannot be divided evenly.
        """
        if size % self.tp.size:
            raise ConfigError(
                f"--tensor-parallel-size {self.tp.size}: {what} is {size}, which is not divisible "
                "by it; choose a divisor"
            )
        return size // self.tp.size

    def stage_layers(self, num_layers: int) -> range:
        """The layers of this pipeline stage; earlier stages have one more where it is uneven.

        Raises ConfigError: there are more stages than layers.
        """
        if num_layers < self.pp_size:
            raise ConfigError(
                f"--pipeline-parallel-size {self.pp_size}: the model has {num_layers} layers, "
                "and each stage needs one; lower it"
            )
        base, extra = divmod(num_layers, self.pp_size)
        start = self.pp_rank * base + min(self.pp_rank, extra)
        return range(start, start + base + (self.pp_rank < extra))
