"""The interface's linear layers, embeddings and experts. Shape suffixes: see `interface`."""

from __future__ import annotations

from typing import Protocol

import msgspec
import torch
from torch import Tensor

from nanocore.kernels import Activation, Score
from nanocore.kernels.grouped_weight import CheckpointWeight, QuantizedForm
from nanocore.kernels.linear_weight import Experts, ExpertWeights, LinearWeight, TokenEmbedding


class Routing(msgspec.Struct, frozen=True):
    """Choice of experts: a token's C with the greatest scores of its logits_TX, in float32.

    bias_X: float32, added to scores to choose by (Wang et al. 2024). Weights are the chosen ones'
    scores without it, the first choice first; is_normalized: divided by their sum + epsilon. They
    are multiplied by factor and rounded to x's dtype. Of equal experts any may come first and be
    the last one chosen (torch.topk, and so transformers, promises nothing); in our kernels the
    smaller number.
    """

    logits_TX: Tensor
    num_chosen: int
    is_normalized: bool
    score: Score = "softmax"
    bias_X: Tensor | None = None
    epsilon: float = 0.0
    factor: float = 1.0


class SharedExpert(msgspec.Struct, frozen=True):
    """Expert that every token passes beside those it chose: sigmoid(gate_T1) out_TE is added."""

    gate_T1: Tensor
    out_TE: Tensor


class LinearKernels(Protocol):
    """Products with weights that the backend has packed.

    kept_forms: of stored weights, those not dequantized. stacks_experts: for one product, and all
    as floats.
    """

    kept_forms: frozenset[QuantizedForm]
    stacks_experts: bool

    def pack_linear(
        self,
        weight: CheckpointWeight,
        quantization: str | None = None,
        dtype: torch.dtype | None = None,
    ) -> LinearWeight:
        """The weight of a linear layer or of an embedding, quantized if so asked.

        The backend may keep the weight's tensors: the caller gives them up. A weight in "fp8" is
        for `linear` and `gated_linear`, and one that such products cannot take stays as it is.
        dtype: of activations, for backends that dequantize what is stored quantized.

        Raises ValueError: no such quantization here.
        """

    def linear(self, x_TI: Tensor, weight: LinearWeight, bias_O: Tensor | None = None) -> Tensor:
        """x W^T + b, rounded once to x's dtype; [T, O]. The weight may have segments."""

    def gated_linear(
        self,
        x_TI: Tensor,
        weight: LinearWeight,
        bias_O: Tensor | None = None,
        activation: Activation = "silu",
    ) -> Tensor:
        """act(first half) * second half of what `linear` says; [T, O / 2]."""

    def activate(self, x_TI: Tensor, activation: Activation) -> Tensor:
        """act(x) in x's dtype, for MLPs without a gate; [T, I]."""

    def logits(self, x_RE: Tensor, weight: LinearWeight, softcap: float = 0.0) -> Tensor:
        """x W^T as float32, [R, O]; with a softcap, softcap * tanh(logits / softcap)."""

    def embedding(self, token_ids_T: Tensor, embedding: TokenEmbedding) -> Tensor:
        """Hidden states of these tokens (int64), [T, E]."""

    def pack_experts(self, weights: ExpertWeights) -> Experts:
        """All of a layer's experts for `moe`; the caller gives the weights up."""

    def moe(
        self,
        x_TE: Tensor,
        experts: Experts,
        routing: Routing,
        shared: SharedExpert | None = None,
        activation: Activation = "silu",
    ) -> Tensor:
        """The weighted sum of each token's C experts, gated MLPs, and the shared one; [T, E].

        Under tensor parallelism the inner size is this rank's share; the caller sums over ranks.
        """
