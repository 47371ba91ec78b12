"""The interface's attention, and what it is told of a step. Shape suffixes: see `interface`."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec
from torch import Tensor


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """Attention's view of a step; built once per step and handed down the call.

    Sequences are ordered decodes first, then prefill chunks. To a kernel a decode is a sequence of
    at most decode_tokens query tokens, the newest one and drafts of those that may follow.
    num_decodes: how many of the B are decodes; num_decodes_1: the same, int32 on the device.
    query_start: B + 1 offsets into T, on the host; query_start_A: the same, int32 on the device.
    seq_lens: B context lengths including this step's tokens, on the host; seq_lens_B: the same,
    int32 on the device. A sequence of length 0 is padding, and its tokens are.
    block_table: int32 [rows, M], block ids of one group of layers; entries past a sequence's length
    are arbitrary valid ids, and so are those before the window of its first query, if the group has
    one. table_rows_B: int64, the row of each sequence in it; None: sequence i has row i, as
    backends for a device beside the host need it. positions_T: int64, each token's place in its
    sequence. slot_mapping_T: int64, where its K and V go: block_id * S + slot; -1 is padding: such
    a token is stored nowhere. Tokens past query_start[-1], or query_start_A[-1], are padding too.

    In a step that a graph replays, what is on the device is that step's, and what is on the host is
    what it was at capture, an upper bound: num_decodes sequences may be decodes, and any sequence
    may be a chunk if on the host the first of these, or all of them, have more tokens than decodes.

    rows_B, num_right_B, num_drafts_B: see `StepRows`; for layers with states. None: no row drafts.

    scratch: what a backend worked out of all this for one layer, for it to find in the next. So an
    instance serves one step, or one capture of a graph.
    """

    num_decodes: int
    query_start: list[int]
    seq_lens: list[int]
    num_decodes_1: Tensor
    query_start_A: Tensor
    seq_lens_B: Tensor
    block_table: Tensor
    positions_T: Tensor
    slot_mapping_T: Tensor
    table_rows_B: Tensor | None = None
    decode_tokens: int = 1
    rows_B: Tensor | None = None
    num_right_B: Tensor | None = None
    num_drafts_B: Tensor | None = None
    scratch: dict[Hashable, Any] = field(default_factory=dict, init=False, repr=False)

    @property
    def num_decoded(self) -> int:
        """The most tokens of decodes, on the host; 0 if any sequence may be a chunk."""
        num_decodes, most = self.num_decodes, self.decode_tokens
        first, decoded = (self.query_start[n] for n in (min(1, num_decodes), num_decodes))
        return 0 if first > most or decoded > num_decodes * most else decoded

    @property
    def block_table_BM(self) -> Tensor:
        """The table, for kernels that need sequence i to have row i."""
        assert self.table_rows_B is None, "such a backend's begin_step gathers rows"
        return self.block_table

    def block_ids(self, sequences: slice) -> Tensor:
        """Block ids of some of the B sequences, int32 [those, M]."""
        if self.table_rows_B is None:
            return self.block_table[sequences]
        return self.block_table.index_select(0, self.table_rows_B[sequences])


class KVCache(msgspec.Struct, frozen=True):
    """One layer's K and V, each [num_blocks, block_size, kv_heads, head_dim].

    Within a block a backend may keep values in an order of its own; zeros are zeros in any.

    k_scale_NSK, v_scale_NSK: for quantized caches (see `kv_quantization`), what a token's values
    are to be multiplied by, one number for each KV head. All four are contiguous within a block,
    and block_bytes lead from a block to the next: other layers may lie between. group: the number
    of the layer's group, see `StepRows`.
    """

    k_NSKD: Tensor
    v_NSKD: Tensor
    k_scale_NSK: Tensor | None = None
    v_scale_NSK: Tensor | None = None
    group: int = 0

    def __post_init__(self) -> None:
        block_bytes = self.block_bytes
        for x in (self.k_NSKD, self.v_NSKD, self.k_scale_NSK, self.v_scale_NSK):
            assert x is None or (x[0].is_contiguous() and x.stride(0) * x.itemsize == block_bytes)

    @property
    def block_bytes(self) -> int:
        """Distance from a block's first byte to the next one's."""
        return self.k_NSKD.stride(0) * self.k_NSKD.itemsize


class AttentionSpec(msgspec.Struct, frozen=True):
    """A layer's kind of attention, the same in every step.

    scale: what q k^T is multiplied by, above 0. window: a token attends to itself and the
    window - 1 tokens before it; 0: to all before it (Longformer: Beltagy et al. 2020; Mistral:
    Jiang et al. 2023). softcap: scaled logits become softcap * tanh(logits / softcap); 0: off
    (Gemma 2, 2024).
    """

    scale: float
    window: int = 0
    softcap: float = 0.0


class QKNorm(msgspec.Struct, frozen=True):
    """Norms of each head of Q and K. weights: [D]; for their dtype see `StepKernels.rms_norm`."""

    q_weight: Tensor
    k_weight: Tensor
    eps: float


class Rotary(msgspec.Struct, frozen=True):
    """Rotary embedding (half-split): cos and sin of every position, [L, rotary_dim / 2].

    The first rotary_dim <= D dimensions of a head are turned and the rest passes through (partial
    RoPE, as in Phi). Both have the model's dtype.
    """

    cos: Tensor
    sin: Tensor


class AttentionKernels(Protocol):
    """Attention over a paged KV cache. block_multiple: block sizes must be multiples of it."""

    block_multiple: int

    def rope_and_store_kv(
        self,
        qkv: Tensor,
        num_heads: int,
        qk_norm: QKNorm | None,
        rotary: Rotary,
        cache: KVCache,
        metadata: AttentionMetadata,
    ) -> Tensor:
        """Norm Q and K, turn them by their positions, write K and V to the cache; Q, [T, H, D].

        qkv: [T, (H + 2 K) D], the heads of Q, then of K, then of V; Q may be written over.
        """

    def paged_attention(
        self, q_THD: Tensor, cache: KVCache, metadata: AttentionMetadata, spec: AttentionSpec
    ) -> Tensor:
        """Causal attention of each query token over its sequence's blocks; [T, H, D].

        All writes to the cache of the step precede it. Rows of padding tokens are zero.
        """
