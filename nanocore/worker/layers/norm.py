"""Root mean square layer normalisation (Zhang and Sennrich 2019), and the older kind."""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from nanocore.kernels.interface import Kernels
from nanocore.worker.config.model_config import ModelConfig, OffsetNormConfig
from nanocore.worker.loading.weights import Entries, whole
from nanocore.worker.placement import Placement


class Norm:
    """A norm of hidden states over their last dimension; not split over ranks.

    dtype: of the weight; None is the model's. With float32, kernels round the product with it once.
    offset: see `TensorEntry`.
    """

    dtype: ClassVar[torch.dtype | None] = None
    offset = 0.0

    def __init__(self, placement: Placement, config: ModelConfig, size: int) -> None:
        self.eps = config.norm_eps
        self.weight = placement.empty(size, dtype=self.dtype)

    def entries(self, name: str) -> Entries:
        """Map the checkpoint's tensors with this name to the parameters."""
        return {f"{name}.weight": whole(self.weight, self.offset)}

    def __call__(self, x: Tensor, kernels: Kernels) -> Tensor:
        raise NotImplementedError

    def add(self, x: Tensor, residual: Tensor | None, kernels: Kernels) -> tuple[Tensor, Tensor]:
        """(norm(x + residual), x + residual); without a residual x is it."""
        total = x if residual is None else residual + x
        return self(total, kernels), total

    def select_add(
        self, x_TE: Tensor, residual_TE: Tensor, index_R: Tensor, kernels: Kernels
    ) -> Tensor:
        """norm(x + residual) of these rows, [R, E]."""
        return self(residual_TE[index_R] + x_TE[index_R], kernels)


class RMSNorm(Norm):
    """x / rms(x) * weight."""

    def __call__(self, x: Tensor, kernels: Kernels) -> Tensor:
        return kernels.rms_norm(x, self.weight, self.eps)

    def add(self, x: Tensor, residual: Tensor | None, kernels: Kernels) -> tuple[Tensor, Tensor]:
        if residual is None:
            return kernels.rms_norm(x, self.weight, self.eps), x
        return kernels.add_rms_norm(x, residual, self.weight, self.eps)

    def select_add(
        self, x_TE: Tensor, residual_TE: Tensor, index_R: Tensor, kernels: Kernels
    ) -> Tensor:
        return kernels.select_add_rms_norm(x_TE, residual_TE, index_R, self.weight, self.eps)


class OffsetNorm(RMSNorm):
    """Keeps with the one added a weight that is stored less one, and rounds the product once."""

    dtype = torch.float32

    def __init__(self, placement: Placement, config: OffsetNormConfig, size: int) -> None:
        super().__init__(placement, config, size)
        self.offset = 0.0 if config.norms_are_whole else 1.0


class LayerNorm(Norm):
    """(x - mean) / deviation * weight + bias (Ba et al. 2016)."""

    def __init__(self, placement: Placement, config: ModelConfig, size: int) -> None:
        super().__init__(placement, config, size)
        self.bias = placement.empty(size)

    def entries(self, name: str) -> Entries:
        return {**super().entries(name), f"{name}.bias": whole(self.bias)}

    def __call__(self, x: Tensor, kernels: Kernels) -> Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)
