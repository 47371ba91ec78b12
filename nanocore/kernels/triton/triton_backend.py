"""The Triton kernels as a backend, for CUDA; matrix products are cuBLAS's.

A decode step launches eight kernels a layer: QKV; norms, rotation and KV store; attention; output;
add and norm; gate and up with the gate, which for more than a few tokens is one more; down; add and
norm. Few sequences take one more, which merges their parts. One kernel before the layers does all
that they need but attention's plan, which the first one of each window makes; after them come the
last norm, of the rows that sample, their logits, and two kernels that sample.
Nothing waits for the device and no launch depends on what is in its memory, so every step can be
captured as a graph.

With batch_invariant, products are ours too, and every token is attended to in tiles of one shape
without parts: its bits are then the same in any batch and any chunks. Shape suffixes: `interface`.
"""

from __future__ import annotations

import os
from typing import Final

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from nanocore.kernels import Activation
from nanocore.kernels.attention import AttentionMetadata, AttentionSpec, KVCache
from nanocore.kernels.group_quantization import quantize_groups
from nanocore.kernels.grouped_weight import CheckpointWeight, Float8Weight, GroupedWeight
from nanocore.kernels.linear import Routing, SharedExpert
from nanocore.kernels.linear_weight import (
    FP8,
    Experts,
    LinearWeight,
    StackedExperts,
    TokenEmbedding,
    can_multiply_float8,
    pack_output_scales,
    pack_rows,
)
from nanocore.kernels.step import GraphSupport, StepRows
from nanocore.kernels.torch.backend import TorchKernels
from nanocore.kernels.triton import (
    filtered_sampling,
    gate,
    grouped_linear,
    grouped_rows,
    matmul,
    norm,
    paged_attention,
    rope,
    sampling,
)
from nanocore.kernels.triton.begin_step import begin_step
from nanocore.kernels.triton.fp8_linear import fp8_linear
from nanocore.kernels.triton.grouped_packing import GroupedLinear, pack_float8, pack_groups
from nanocore.kernels.triton.moe import moe
from nanocore.kernels.triton.routing import route

FUSED_GATE_TOKENS: Final = 64
"""Up to so many tokens a product waits for its weights, whoever computes it: a launch is saved."""

_INTERPRETED_SMS: Final = 4


class TritonKernels(TorchKernels):
    """Implements `interface.Kernels`. num_sms: multiprocessors, among which attention is shared.

    Raises ValueError: the device is not CUDA, and Triton does not interpret (TRITON_INTERPRET=1).
    """

    name = "triton"
    graph_support: GraphSupport = "always"
    kept_forms = frozenset({"grouped", "float8"})

    rms_norm = staticmethod(norm.rms_norm)
    add_rms_norm = staticmethod(norm.add_rms_norm)
    select_add_rms_norm = staticmethod(norm.select_add_rms_norm)
    rope_and_store_kv = staticmethod(rope.rope_and_store_kv)
    best_token = staticmethod(sampling.best_token)
    best_filtered_token = staticmethod(filtered_sampling.best_filtered_token)

    def __init__(
        self,
        device: torch.device,
        batch_invariant: bool = False,
        *,
        keeps_activations: bool = False,
    ) -> None:
        self.variant = f"triton {triton.__version__}, {device.type}"
        if device.type == "cuda":
            major, minor = torch.cuda.get_device_capability(device)
            self.variant += f" {torch.cuda.get_device_name(device)} {major}.{minor}"
            self.num_sms = torch.cuda.get_device_properties(device).multi_processor_count
        elif os.environ.get("TRITON_INTERPRET") == "1":
            self.num_sms = _INTERPRETED_SMS
        else:
            raise ValueError(f"the device is {device}, and Triton's kernels are for CUDA; use auto")
        self.batch_invariant = batch_invariant
        self.keeps_activations = keeps_activations

    def pack_linear(
        self,
        weight: CheckpointWeight,
        quantization: str | None = None,
        dtype: torch.dtype | None = None,
    ) -> LinearWeight:
        """Pack as `interface` says; stored numbers of few bits stay as they are.

        E4M3 with a scale for each output is multiplied with activations in E4M3, as its format
        means it, where the device and the sizes allow it. Scales of blocks would have each product
        of eight bits summed up by blocks, which is slower than bfloat16's: activations stay as
        they are there, and with batch invariance, since torch's product depends on the batch.
        """
        if isinstance(weight, GroupedWeight):
            return pack_groups(weight)
        if isinstance(weight, Float8Weight):
            keeps_activations = self.batch_invariant or self.keeps_activations or weight.has_blocks
            if keeps_activations or not self._has_fp8(weight.values_OI):
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
        if isinstance(weight, GroupedLinear):
            return grouped_linear.linear(x_TI, weight, bias_O, batch_invariant=self.batch_invariant)
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
        if weight.segments:
            return gate.gated(self.linear(x_TI, weight, bias_O), activation)
        if isinstance(weight, GroupedLinear):
            return grouped_linear.gated_linear(
                x_TI, weight, bias_O, activation, batch_invariant=self.batch_invariant
            )
        if weight.dtype == FP8:
            return gate.gated(fp8_linear(x_TI, weight, bias_O), activation)
        if self._is_ours(weight) or len(x_TI) <= FUSED_GATE_TOKENS:
            return matmul.gated_linear(
                x_TI, weight, bias_O, activation, batch_invariant=self.batch_invariant
            )
        return gate.gated(F.linear(x_TI, weight.data, bias_O), activation)

    def logits(self, x_RE: Tensor, weight: LinearWeight, softcap: float = 0.0) -> Tensor:
        assert weight.dtype != FP8, "a head stays in the model's dtype"
        if isinstance(weight, GroupedLinear):
            logits_RV = grouped_linear.linear(
                x_RE, weight, out_dtype=torch.float32, batch_invariant=self.batch_invariant
            )
        elif self._is_ours(weight):
            logits_RV = self._multiply(x_RE, weight, out_dtype=torch.float32)
        elif x_RE.is_cuda and x_RE.dtype != torch.float32:
            # Not rounded on the way: there are no ties then that the product has not.
            logits_RV = torch.mm(x_RE, weight.data.t(), out_dtype=torch.float32)
        else:
            logits_RV = F.linear(x_RE, weight.data).float()
        return logits_RV.div_(softcap).tanh_().mul_(softcap) if softcap else logits_RV

    def begin_step(
        self, rows: StepRows, embedding: TokenEmbedding | None
    ) -> tuple[Tensor, Tensor | None]:
        if embedding is None or not isinstance(embedding.weight, GroupedLinear):
            return begin_step(rows, embedding)
        block_table_BM, _ = begin_step(rows, None)
        return block_table_BM, grouped_rows.embed(rows.token_ids(), embedding)

    def embedding(self, token_ids_T: Tensor, embedding: TokenEmbedding) -> Tensor:
        if isinstance(embedding.weight, GroupedLinear):
            return grouped_rows.embed(token_ids_T, embedding)
        return super().embedding(token_ids_T, embedding)

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

    def paged_attention(
        self, q_THD: Tensor, cache: KVCache, metadata: AttentionMetadata, spec: AttentionSpec
    ) -> Tensor:
        return paged_attention.paged_attention(
            q_THD, cache, metadata, spec, num_sms=self.num_sms, batch_invariant=self.batch_invariant
        )

    def _has_fp8(self, values_OI: Tensor) -> bool:
        """Whether torch's product of E4M3 takes such a weight."""
        is_old = values_OI.is_cuda and torch.cuda.get_device_capability(values_OI.device) < (8, 9)
        return can_multiply_float8(values_OI) and not is_old

    def _is_ours(self, weight: LinearWeight) -> bool:
        return self.batch_invariant or weight.scale_O is not None

    def _multiply(
        self,
        x_TI: Tensor,
        weight: LinearWeight,
        bias_O: Tensor | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> Tensor:
        return matmul.linear(x_TI, weight, bias_O, out_dtype, batch_invariant=self.batch_invariant)
