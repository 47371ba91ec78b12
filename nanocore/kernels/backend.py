"""The interface every kernel backend implements, and the choice among them.

Tensor shape suffixes, here and in the whole worker:
    T tokens of the step     B sequences of the step    R sequences that sample a token
    H query heads            K key/value heads          D head dimension
    E hidden size            V vocabulary               M block table width
    N blocks in the cache    S slots (tokens) per block
    L tokens of a context    G query heads per KV head
    X experts                C experts chosen per token    I inner size of an MLP
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from nanocore.kernels.torch_backend import TorchKernels


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """What attention must know of a step; built once per step and handed down the call.

    Sequences are ordered decodes first (one query token each), then prefill chunks.
    num_decodes: how many of the B are decodes.
    query_start: B + 1 offsets into T, on the host. seq_lens: B context lengths including this
    step's tokens, on the host; seq_lens_B: the same, int32 on the device.
    block_table_BM: int32 block ids of each sequence; entries past its length are arbitrary valid
    ids. slot_mapping_T: int64, where each token's K and V go: block_id * S + slot; -1 is padding:
    such a token is stored nowhere. Tokens past query_start[-1] are padding too.
    """

    num_decodes: int
    query_start: list[int]
    seq_lens: list[int]
    seq_lens_B: Tensor
    block_table_BM: Tensor
    slot_mapping_T: Tensor


@dataclass(frozen=True, slots=True)
class KVCache:
    """One layer's K and V, each [num_blocks, block_size, kv_heads, head_dim].

    k_scale_NSK, v_scale_NSK: for quantized caches (see `kv_quantization`), what a token's values
    are to be multiplied by, one number for each KV head. All four are contiguous.
    """

    k_NSKD: Tensor
    v_NSKD: Tensor
    k_scale_NSK: Tensor | None = None
    v_scale_NSK: Tensor | None = None


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """What a layer's attention is, the same in every step.

    scale: what q k^T is multiplied by. window: a token attends to itself and the window - 1 tokens
    before it; 0: to all before it (Longformer: Beltagy et al. 2020; Mistral: Jiang et al. 2023).
    softcap: scaled logits become softcap * tanh(logits / softcap); 0: off (Gemma 2, 2024).
    """

    scale: float
    window: int = 0
    softcap: float = 0.0


class Kernels(Protocol):
    """A backend. Activations are in the model's dtype; norms and softmax accumulate in float32."""

    name: str

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x / rms(x) * weight over the last dimension; x [..., E], weight [E]; x's dtype.

        x / rms(x) is float32, rounded to the weight's dtype and then multiplied. So a weight of
        x's dtype rounds before the product, as Llama's and Qwen's norms do, and a float32 weight
        after it, as Gemma's do.
        """
        ...

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """(rms_norm(x + residual), x + residual); all [T, E]."""
        ...

    def rope(self, x_THD: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
        """Rotary embedding in the half-split layout; cos and sin in x's dtype.

        cos and sin are [T, rotary_dim / 2] with rotary_dim <= D: the first rotary_dim dimensions of
        a head are turned and the rest passes through (partial RoPE, as in Phi).
        """
        ...

    def silu_and_mul(self, x: Tensor) -> Tensor:
        """silu(first half) * second half of the last dimension; [T, 2 I] to [T, I]."""
        ...

    def gelu_and_mul(self, x: Tensor) -> Tensor:
        """gelu(first half) * second half, with the tanh approximation; [T, 2 I] to [T, I]."""
        ...

    def moe(
        self,
        x_TE: Tensor,
        gate_up_XIE: Tensor,
        down_XEI: Tensor,
        expert_ids_TC: Tensor,
        weights_TC: Tensor,
    ) -> Tensor:
        """The weighted sum of each token's C experts, SwiGLU MLPs; [T, E].

        gate_up_XIE: [X, 2 I, E], gate before up. down_XEI: [X, E, I]. Under tensor parallelism I is
        this rank's share and the caller sums over ranks. expert_ids_TC: int64, below X.
        weights_TC: rounded to x's dtype; they are not normalised here.
        """
        ...

    def store_kv(
        self, k_TKD: Tensor, v_TKD: Tensor, cache: KVCache, slot_mapping_T: Tensor
    ) -> None:
        """Write each token's K and V to its slot. All writes of a layer precede its attention.

        slot_mapping_T: int64; -1 writes nothing, the others are distinct.
        """
        ...

    def paged_attention(
        self, q_THD: Tensor, cache: KVCache, metadata: AttentionMetadata, spec: AttentionSpec
    ) -> Tensor:
        """Causal attention of each query token over its sequence's blocks; [T, H, D].

        Rows of padding tokens are zero.
        """
        ...


def select_kernels(name: str, device: torch.device) -> Kernels:
    """The backend of this name; "auto" takes the best one that this device can run.

    Raises:
        ValueError: no such backend.
    """
    if name in ("auto", TorchKernels.name):
        return TorchKernels()
    raise ValueError(f"no kernel backend {name!r} for {device}; there is: torch")
