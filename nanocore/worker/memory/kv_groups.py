"""Groups of layers that keep the same tokens, and how their blocks share memory.

A model's memory is cut into slabs, which hold whole blocks of any group (see
`nanocore.kv_cache.slab_pool`). Every rank has as many blocks in a slab, and as many slabs, whatever
its layers take; with one group a slab is a block.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, NamedTuple

import msgspec

ALIGNMENT_BYTES: Final = 64
"""Alignment of a block and of each layer's K and V in it: a cache line, and what TMA needs."""


class CacheKind(NamedTuple):
    """What layers of a group keep; the smallest is the primary group's.

    has_states: a state for all tokens before, instead of K and V of each. window: tokens that a
    token sees, itself included; 0: all.
    """

    has_states: bool = False
    window: int = 0

    @property
    def name(self) -> str:
        if self.has_states:
            return "state"
        return f"window({self.window})" if self.window else "full"


class KVGroup(msgspec.Struct, frozen=True):
    """Layers that keep the same tokens, over all ranks.

    num_layers: of the model. per_slab: blocks of a slab.
    """

    kind: CacheKind
    num_layers: int
    per_slab: int = 1


class LayerGroup(msgspec.Struct, frozen=True):
    """Layers of one rank that keep the same tokens. block_bytes: of a block of them."""

    kind: CacheKind
    num_layers: int
    block_bytes: int


_MOST_SLAB_BLOCKS: Final = 16
_SMALL_SHARE: Final = 0.01


def blocks_per_slab(block_bytes: Sequence[int]) -> list[int]:
    """Return how many blocks of each group a slab is to hold. block_bytes: of a block of each.

    The smallest slab that wastes less than a hundredth of it, or else the one that wastes least.
    """
    if len(block_bytes) == 1:
        return [1]
    best, least = [1] * len(block_bytes), math.inf
    for number in range(1, _MOST_SLAB_BLOCKS + 1):
        per_slab = [number * max(block_bytes) // one for one in block_bytes]
        slab = slab_bytes(per_slab, block_bytes)
        waste = max(1 - n * one / slab for n, one in zip(per_slab, block_bytes, strict=True))
        if waste < least:
            best, least = per_slab, waste
        if least < _SMALL_SHARE:
            break
    return best


def slab_bytes(per_slab: Sequence[int], block_bytes: Sequence[int]) -> int:
    """Return the bytes of a slab, which is cut evenly and aligned for each group."""
    least = max(n * one for n, one in zip(per_slab, block_bytes, strict=True))
    return aligned(least, ALIGNMENT_BYTES * math.lcm(*per_slab))


def rank_slab_bytes(own: Sequence[LayerGroup], groups: Sequence[KVGroup]) -> int:
    """Return the bytes of a slab on a rank with these layers."""
    block_bytes = {group.kind: group.block_bytes for group in own}
    sizes = [block_bytes.get(group.kind, 0) for group in groups]
    return slab_bytes([group.per_slab for group in groups], sizes)


def joined_groups(stages: Sequence[Sequence[LayerGroup]]) -> list[KVGroup]:
    """Return the groups of a model from those of its stages, the one that keeps all first."""
    every = [group for own in stages for group in own]
    kinds = sorted({group.kind for group in every})
    of = {kind: [group for group in every if group.kind == kind] for kind in kinds}
    per_slab = blocks_per_slab([sum(one.block_bytes for one in of[kind]) for kind in kinds])
    return [
        KVGroup(kind, sum(one.num_layers for one in of[kind]), number)
        for kind, number in zip(kinds, per_slab, strict=True)
    ]


def aligned(num_bytes: int, alignment: int) -> int:
    return -(-num_bytes // alignment) * alignment
