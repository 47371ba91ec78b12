"""Products, embeddings and experts on CUDA: by cuBLAS, or by our kernels. Suffixes: `interface`."""

from __future__ import annotations

from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from nanocore.kernels import Activation
from nanocore.kernels.group_quantization import quantize_groups
from nanocore.kernels.grouped_weight import (
    CheckpointWeight,
    Float8Weight,
    GroupedWeight,
    QuantizedForm,
)
from nanocore.kernels.linear import Routing, SharedExpert
from nanocore.kernels.linear_weight import (
    FP8,
    Experts,
    LinearWeight,
    StackedExperts,
    can_multiply_float8,
    pack_output_scales,
    pack_rows,
    stack,
)
from nanocore.kernels.torch.linear import activate
from nanocore.kernels.triton import grouped_linear, matmul
from nanocore.kernels.triton.fp8_linear import fp8_linear
from nanocore.kernels.triton.gate import gated
from nanocore.kernels.triton.grouped_packing import GroupedLinear, pack_float8, pack_groups
from nanocore.kernels.triton.grouped_rows import embed
from nanocore.kernels.triton.moe import moe
from nanocore.kernels.triton.routing import route

FUSED_GATE_TOKENS: Final = 64
"""Up to so many tokens a product waits for its weights, whoever computes it: a launch is saved."""


class TritonLinear:
    """Implements `LinearKernels`. keeps_activations: no product may quantize them."""

    kept_forms: frozenset[QuantizedForm] = frozenset({"grouped", "float8"})
    stacks_experts = True
    batch_invariant: bool
    keeps_activations: bool
    activate = staticmethod(activate)
    embedding = staticmethod(embed)
    pack_experts = staticmethod(stack)

    def pack_linear(
        self,
        weight: CheckpointWeight,
        quantization: str | None = None,
        dtype: torch.dtype | None = None,
    ) -> LinearWeight:
        """Pack as `LinearKernels` says; stored numbers of few bits stay as they are.

        E4M3 with a scale for each output is multiplied with activations in E4M3, as its format
        means it, where the device and the sizes allow it. Scales of blocks would have each product
        of eight bits summed up by blocks, which is slower than bfloat16's: activations stay as
        they are there, and with batch invariance, since torch's product depends on the batch.
        """
        if isinstance(weight, GroupedWeight):
            return pack_groups(weight)
        if isinstance(weight, Float8Weight):
            keeps_activations = self.batch_invariant or self.keeps_activations or weight.has_blocks
            if keeps_activations or not _has_fp8(weight.values_OI):
                return pack_float8(weight)
            out_features, in_features = weight.values_OI.shape
            scale_O = weight.scale.float().flatten().contiguous()
            values_OI = weight.values_OI.contiguous()
            return LinearWeight(out_features, in_features, FP8, values_OI, scale_O)
        if quantization == "int4":
            return pack_groups(quantize_groups(weight))
        if quantization == "int8":
            return pack_output_scales(weight)
        return pack_rows(weight, quantization, dtype)

    def linear(self, x_TI: Tensor, weight: LinearWeight, bias_O: Tensor | None = None) -> Tensor:
        if weight.segments:
            parts = weight.parts(bias_O)
            return torch.cat([self.linear(x_TI, *part) for part in parts], dim=1)
        if weight.dtype == FP8:
            return fp8_linear(x_TI, weight, bias_O)
        if self._is_ours(weight):
            return self._multiply(x_TI, weight, bias_O)
        return F.linear(x_TI, weight.data, bias_O)

    def gated_linear(
        self,
        x_TI: Tensor,
        weight: LinearWeight,
        bias_O: Tensor | None = None,
        activation: Activation = "silu",
    ) -> Tensor:
        is_one = not weight.segments and weight.dtype != FP8
        if is_one and (self._is_ours(weight) or len(x_TI) <= FUSED_GATE_TOKENS):
            return self._multiply(x_TI, weight, bias_O, activation=activation)
        return gated(self.linear(x_TI, weight, bias_O), activation)

    def logits(self, x_RE: Tensor, weight: LinearWeight, softcap: float = 0.0) -> Tensor:
        assert weight.dtype != FP8, "a head stays in the model's dtype"
        if self._is_ours(weight):
            logits_RV = self._multiply(x_RE, weight, out_dtype=torch.float32)
        elif x_RE.is_cuda and x_RE.dtype != torch.float32:
            # Not rounded on the way: there are no ties then that the product has not.
            logits_RV = torch.mm(x_RE, weight.data.t(), out_dtype=torch.float32)
        else:
            logits_RV = F.linear(x_RE, weight.data).float()
        return logits_RV.div_(softcap).tanh_().mul_(softcap) if softcap else logits_RV

    def moe(
        self,
        x_TE: Tensor,
        experts: Experts,
        routing: Routing,
        shared: SharedExpert | None = None,
        activation: Activation = "silu",
    ) -> Tensor:
        assert isinstance(experts, StackedExperts)
        return moe(
            x_TE, experts, *route(routing), activation, shared, batch_invariant=self.batch_invariant
        )

    def _is_ours(self, weight: LinearWeight) -> bool:
        is_quantized = isinstance(weight, GroupedLinear) or weight.scale_O is not None
        return self.batch_invariant or is_quantized

    def _multiply(
        self,
        x_TI: Tensor,
        weight: LinearWeight,
        bias_O: Tensor | None = None,
        out_dtype: torch.dtype | None = None,
        activation: Activation | None = None,
    ) -> Tensor:
        operands, steady = (bias_O, out_dtype, activation), self.batch_invariant
        if isinstance(weight, GroupedLinear):
            return grouped_linear.linear(x_TI, weight, *operands, batch_invariant=steady)
        return matmul.linear(x_TI, weight, *operands, batch_invariant=steady)


def _has_fp8(values_OI: Tensor) -> bool:
    """Whether torch's product of E4M3 takes such a weight."""
    is_old = values_OI.is_cuda and torch.cuda.get_device_capability(values_OI.device) < (8, 9)
    return can_multiply_float8(values_OI) and not is_old
