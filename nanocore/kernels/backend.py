"""The interface every kernel backend implements, and the choice among them.

Tensor shape suffixes, here and in the whole worker:
    T tokens of the step     B sequences of the step    R sequences that sample a token
    H query heads            K key/value heads          D head dimension
    E hidden size            V vocabulary               M block table width
    N blocks in the cache    S slots (tokens) per block
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
    ids. slot_mapping_T: int64, where each token's K and V go: block_id * S + slot; -1 is padding.
    """

    num_decodes: int
    query_start: list[int]
    seq_lens: list[int]
    seq_lens_B: Tensor
    block_table_BM: Tensor
    slot_mapping_T: Tensor


@dataclass(frozen=True, slots=True)
class SamplingMetadata:
    """How each of R rows samples; all tensors on the device.

    all_greedy: no row needs noise, known on the host. filters: some row has top_k, top_p or min_p.
    greedy_R: bool. temperature_R, top_p_R, min_p_R: float32. top_k_R: int32, V where it is off.
    seed_R, position_R: int64; a row's noise is a function of these two and the token id.
    """

    all_greedy: bool
    filters: bool
    greedy_R: Tensor
    temperature_R: Tensor
    top_k_R: Tensor
    top_p_R: Tensor
    min_p_R: Tensor
    seed_R: Tensor
    position_R: Tensor


class Kernels(Protocol):
    """A backend. Activations are in the model's dtype; norms and softmax accumulate in float32."""

    name: str

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x / rms(x) * weight over the last dimension; x [..., E], weight [E]."""
        ...

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """(rms_norm(x + residual), x + residual); all [T, E]."""
        ...

    def rope(self, x_THD: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
        """Rotary embedding in the half-split layout; cos and sin [T, D / 2], x's dtype."""
        ...

    def silu_and_mul(self, x: Tensor) -> Tensor:
        """silu(first half) * second half of the last dimension; [T, 2 I] to [T, I]."""
        ...

    def store_kv(
        self,
        k_TKD: Tensor,
        v_TKD: Tensor,
        k_cache_NSKD: Tensor,
        v_cache_NSKD: Tensor,
        slot_mapping_T: Tensor,
    ) -> None:
        """Write each token's K and V to its slot. All writes of a layer precede its attention."""
        ...

    def paged_attention(
        self,
        q_THD: Tensor,
        k_cache_NSKD: Tensor,
        v_cache_NSKD: Tensor,
        metadata: AttentionMetadata,
        scale: float,
    ) -> Tensor:
        """Causal attention of each query token over its sequence's blocks; [T, H, D]."""
        ...

    def sample(self, logits_RV: Tensor, metadata: SamplingMetadata) -> Tensor:
        """One token id per row, int64 [R]; logits float32."""
        ...


def select_kernels(name: str, device: torch.device) -> Kernels:
    """The backend of this name; "auto" takes the best one that this device can run.

    Raises:
        ValueError: no such backend.
    """
    if name in ("auto", TorchKernels.name):
        return TorchKernels()
    raise ValueError(f"no kernel backend {name!r} for {device}; there is: torch")
