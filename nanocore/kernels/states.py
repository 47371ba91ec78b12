"""The interface's layers that carry a state from token to token. Shape suffixes: see `interface`;
further, C channels and L taps of a convolution.

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
    """One layer's states, [num_blocks, *shape of a state], each contiguous.

    Other layers may lie between blocks. block_size: tokens per block. group: the number of the
    layer's group, see `StepRows`.
    """

    states_N: Tensor
    block_size: int
    group: int

    @property
    def block_bytes(self) -> int:
        """Distance from a block's first byte to the next one's."""
        return self.states_N.stride(0) * self.states_N.itemsize


LayerCache = KVCache | StateCache


class ConvFilters(msgspec.Struct, frozen=True):
    """A causal convolution's filter of each channel, float32 [L, C], the newest token's tap last.

    bias_C: float32. L is at most MAX_TAPS.
    """

    taps_LC: Tensor
    bias_C: Tensor | None = None


class StateKernels(Protocol):
    """Layers with states. Rows of padding tokens are zero, and change no state.

    In a sequence's block table an id below 0 is a block without memory; the last token of a step
    has a block with memory.
    """

    def short_conv(
        self, x: Tensor, filters: ConvFilters, cache: StateCache, metadata: AttentionMetadata
    ) -> Tensor:
        """c * conv(b * u) of each token, [T, C]. x: [T, 3 C], the channels of b, of c and of u.

        b * u and the convolution's result are rounded to x's dtype. A state is the last L - 1
        tokens' b * u, the oldest first, [L - 1, C], in x's dtype (LFM2, Liquid AI 2025).
        """
