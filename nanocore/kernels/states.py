"""The interface's layers that carry a state from token to token. Shape suffixes: see `interface`;
further, C channels and L taps of a convolution, and P value heads.

A sequence's state after a token lies in the block of that token, as K and V do; blocks that nobody
goes on from have no memory (see `nanocore.kv_cache.state_group`).
"""

from __future__ import annotations

from typing import Final, Protocol

import msgspec
from torch import Tensor

from nanocore.kernels.attention import AttentionMetadata, KVCache

MAX_TAPS: Final = 8


class StateCache(msgspec.Struct, frozen=True):
    """One layer's states, one in a block, each contiguous.

    conv_NLC: [num_blocks, L - 1, C], the last inputs of a convolution, the oldest first.
    delta_N: float32 [num_blocks, P, key_dim, value_dim], the matrices of a delta rule, if the layer
    has one; within a block a backend may keep them in an order of its own. Other layers may lie
    between blocks. block_size: tokens per block. group: the number of the layer's group, see
    `StepRows`.

    drafts_RKI: [rows, most drafts of a row, I], inputs of the drafts that a row's last step ended
    with: the convolution's, and then those of the delta rule (qkv, b and a). A draft may be wrong,
    and no state can be taken back: so a step leaves the state behind its last token that is no
    draft, and begins with the last step's drafts that were right. None: no row drafts.
    """

    conv_NLC: Tensor
    delta_N: Tensor | None
    block_size: int
    group: int
    drafts_RKI: Tensor | None = None


LayerCache = KVCache | StateCache


class ConvFilters(msgspec.Struct, frozen=True):
    """A causal convolution's filter of each channel, float32 [L, C], the newest token's tap last.

    bias_C: float32. L is at most MAX_TAPS.
    """

    taps_LC: Tensor
    bias_C: Tensor | None = None


class DeltaRule(msgspec.Struct, frozen=True):
    """A layer's delta rule with gates (Gated DeltaNet: Yang et al. 2024); the same in every step.

    decay_P: float32, -exp(A_log). time_bias_P: float32. is_tiled: value head h has key head
    h % num_key_heads, and not h // (value heads per key head).
    """

    num_key_heads: int
    key_dim: int
    value_dim: int
    decay_P: Tensor
    time_bias_P: Tensor
    is_tiled: bool = False


class StateKernels(Protocol):
    """Layers with states. Rows of padding tokens are zero, and change no state.

    In a sequence's block table an id below 0 is a block without memory; the last token of a step
    has a block with memory.
    """

    def short_conv(
        self, x: Tensor, filters: ConvFilters, cache: StateCache, metadata: AttentionMetadata
    ) -> Tensor:
        """c * conv(b * u) of each token, [T, C]. x: [T, 3 C], the channels of b, of c and of u.

        b * u and the convolution's result are rounded to x's dtype. A state has the last L - 1
        tokens' b * u, in x's dtype (LFM2, Liquid AI 2025).
        """

    def silu_conv(
        self, x: Tensor, filters: ConvFilters, cache: StateCache, metadata: AttentionMetadata
    ) -> Tensor:
        """silu(conv(x)) of each token, [T, C]; the convolution's result is rounded. x: [T, C]."""

    def delta_rule(
        self,
        qkv: Tensor,
        gates_T2P: Tensor,
        rule: DeltaRule,
        cache: StateCache,
        metadata: AttentionMetadata,
    ) -> Tensor:
        """Results of each token's value heads, [T, P * value_dim].

        q and k are divided by their lengths, and q by the root of key_dim. In float32, for each
        token and value head: S *= exp(decay * softplus(a + time_bias));
        S += k (sigmoid(b) (v - S^T k))^T; the result is S^T q.

        Args:
            qkv: [T, heads of q, of k, and of v]. gates_T2P: [T, 2 P], b and a of each value head;
                sigmoid(b) is rounded to its dtype.
        """

    def join_previous(
        self, x_TE: Tensor, hidden_TE: Tensor, kept_RKE: Tensor, metadata: AttentionMetadata
    ) -> Tensor:
        """Each token's x, and then the hidden state of the token before it; [T, 2 E].

        A sequence's first token has the one that `keep_last` kept of its row in the step before,
        after as many of that step's drafts as were right. Zeros there stand for none; then the
        token's result is zeros.
        """

    def keep_last(self, hidden_TE: Tensor, kept_RKE: Tensor, metadata: AttentionMetadata) -> None:
        """Keep of each row the hidden state of its last token that is no draft, and of its drafts.

        kept_RKE: [rows, 1 + most drafts of a row, E].
        """

    def sigmoid_gate(self, x: Tensor, gate: Tensor) -> Tensor:
        """sigmoid(gate) * x, the sigmoid rounded to x's dtype before; [T, I]."""

    def gated_norm(self, x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
        """silu(gate) times the RMS norm of each head of x; [T, heads * D]. weight: [D].

        The norm is rounded as in `rms_norm` with a weight of x's dtype. gate: as x.
        """
