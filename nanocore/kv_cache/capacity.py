"""What requests take of the memory: blocks of each group of layers, and slabs for all of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec


def num_seen(window: int, block_size: int) -> int:
    """Return how many blocks before a boundary the next token sees."""
    return -(-(window - 1) // block_size)


class CacheGroup(msgspec.Struct, frozen=True):
    """Layers that keep the same of a request.

    window: tokens that a token sees, itself included; 0: all. per_slab: blocks of a slab.
    spacing: 0, or layers keep states, see `state_group`: 1 at every block's end, else this many
    blocks from a prompt's start and at powers of two times that.
    """

    name: str
    window: int = 0
    per_slab: int = 1
    spacing: int = 0

    @property
    def keeps_all(self) -> bool:
        """Whether a request holds a block for each of its tokens: then it can be the primary."""
        return not (self.window or self.spacing)

    def most_blocks(self, num_blocks: int, block_size: int, max_step_tokens: int) -> int:
        """Return how many blocks a request holds at most at a time, which has num_blocks in all."""
        if self.keeps_all:
            return num_blocks
        # A step's tokens may begin and end within a block.
        num_of_step = -(-max_step_tokens // block_size) + 1
        if self.spacing > 1:
            num_powers = (num_of_step // self.spacing).bit_length()
            # What it goes on from, where it ends, and checkpoints.
            return min(num_blocks, 2 + num_powers + NUM_BOUNDARIES)
        if self.spacing:
            return min(num_blocks, 1 + num_of_step)
        return min(num_blocks, num_seen(self.window, block_size) + num_of_step)


NUM_BOUNDARIES: Final = 4
"""Boundaries of a request that are its own: see `KVCacheManager.allocate`."""
FULL: Final = (CacheGroup("full"),)
"""The group of models in which every layer keeps all tokens: a slab is a block."""

_ANY_STEP: Final = 2**31


class Capacity(msgspec.Struct, frozen=True):
    """Memory of num_slabs slabs, for blocks of any group: see `slab_pool`.

    block_size: tokens per block. max_step_tokens: of a request in one step; until it is over, a
    window holds them beside what they see.
    """

    num_slabs: int
    block_size: int
    groups: Sequence[CacheGroup] = FULL
    max_step_tokens: int = _ANY_STEP

    @property
    def num_blocks(self) -> int:
        """Blocks that the groups can have, each if it had all of the memory; in sum."""
        return self.num_slabs * sum(group.per_slab for group in self.groups)

    def blocks_of(self, num_tokens: int) -> list[int]:
        """Blocks of each group that a request of so many tokens holds at most."""
        num_blocks = -(-num_tokens // self.block_size)
        return [
            group.most_blocks(num_blocks, self.block_size, self.max_step_tokens)
            for group in self.groups
        ]

    def slabs_of(self, num_tokens: int) -> int:
        """Slabs that a request of so many tokens takes, alone."""
        held = zip(self.groups, self.blocks_of(num_tokens), strict=True)
        return sum(-(-num_blocks // group.per_slab) for group, num_blocks in held)

    def num_requests(self, num_tokens: int) -> int:
        """Requests of so many tokens that fit at once, while one computes the end of its prompt."""
        decoding = msgspec.structs.replace(self, max_step_tokens=1).blocks_of(num_tokens)
        held = sum(n / group.per_slab for group, n in zip(self.groups, decoding, strict=True))
        num_left = self.num_slabs - self.slabs_of(num_tokens)
        return 0 if num_left < 0 else 1 + int(num_left / held)

    @property
    def most_tokens(self) -> int:
        """Tokens of the longest request that fits."""
        # Of windows alone, any length may fit.
        group = self.groups[0]
        low, high = 0, self.num_slabs * group.per_slab if group.keeps_all else _ANY_STEP
        while low < high:
            middle = (low + high + 1) // 2
            if self.slabs_of(middle * self.block_size) <= self.num_slabs:
                low = middle
            else:
                high = middle - 1
        return low * self.block_size

    @property
    def shared_blocks(self) -> str:
        """What fits into the memory, for the log: blocks of one group or of another."""
        if len(self.groups) == 1:
            return f"{self.num_blocks} blocks"
        counts = [
            f"{self.num_slabs * group.per_slab} blocks of {group.name}" for group in self.groups
        ]
        return " or ".join(counts)

    def described(self, num_tokens: int) -> str:
        """What a request of so many tokens takes, by group, for error texts; "" for one group."""
        if len(self.groups) == 1:
            return ""
        held = zip(self.groups, self.blocks_of(num_tokens), strict=True)
        return f" ({', '.join(f'{n} blocks of {group.name}' for group, n in held)})"
