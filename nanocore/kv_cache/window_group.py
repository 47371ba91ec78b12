"""Blocks of layers that see a window of tokens: they hold what the next token sees, and no more.

Blocks that leave the window go back to their pool at once, and stay findable until their memory is
needed. A prefix is found in two places: its blocks' keys in the primary group, which has all of
them, and here the last blocks before the boundary. A block here bears the very key object of the
primary group's block, so a hit is confirmed as far back as it is there.

Some boundaries are likelier to be asked for than others (checkpoints): the ends of prompts, places
where prompts have parted before, and a few between. Blocks outside of every checkpoint's window
are reused first.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Final

from nanocore.kv_cache.block_key import BlockKey
from nanocore.kv_cache.block_pool import Block
from nanocore.kv_cache.capacity import CacheGroup, Capacity, num_seen
from nanocore.kv_cache.events import GroupEvents
from nanocore.kv_cache.prefix_index import GroupIndex
from nanocore.kv_cache.slab_pool import SlabArena, SlabPool

CHECKPOINTS_TOKENS: Final = (512, 1024)
CHECKPOINT_STRIDE_TOKENS: Final = 2048
"""Every prefix has checkpoints at these, and at each multiple of the stride."""


class _Held:
    """A request's blocks from block number `first` on. num_registered: counts from its start.

    boundaries: see `Group.admit`.
    """

    __slots__ = ("blocks", "boundaries", "first", "num_registered")

    def __init__(self, first: int, hits: Sequence[Block], boundaries: Collection[int]) -> None:
        self.first = first
        self.boundaries = boundaries
        self.blocks = list(hits)
        self.num_registered = first + len(hits)

    @property
    def end(self) -> int:
        return self.first + len(self.blocks)


class WindowGroup:
    """Implements `Group` for layers with the same window. num_seen: blocks before a boundary that
    the next token sees.
    """

    def __init__(
        self, group: CacheGroup, capacity: Capacity, arena: SlabArena, events: GroupEvents
    ) -> None:
        block_size = capacity.block_size
        self.group = group
        self.num_seen = num_seen(group.window, block_size)
        self.index = GroupIndex(events)
        self.pool = SlabPool(arena, group.per_slab, self.index.forget)
        self._block_size = block_size
        self._most = group.most_blocks(2**31, block_size, capacity.max_step_tokens)
        # Everybody's checkpoints, in blocks: by the position alone, so prompts agree on them.
        self._early = [num_tokens // block_size for num_tokens in CHECKPOINTS_TOKENS]
        self._stride = CHECKPOINT_STRIDE_TOKENS // block_size or 1
        self._events = events
        self._held: dict[int, _Held] = {}

    def begin_step(self) -> None:
        pass

    def blocks(self, handle: int) -> Sequence[Block]:
        held = self._held.get(handle)
        return held.blocks if held else ()

    def last_boundary(self, keys: Sequence[BlockKey], end: int, soon: bool = False) -> int:
        # Backwards, because a missing block rules out all boundaries that see it at once.
        index = end - 1
        while index >= max(end - self.num_seen, 0):
            if self.index.find(keys[index]) is None:
                end = index  # no boundary between would do without this block
            index -= 1
        return end

    def seen(self, keys: Sequence[BlockKey], boundary: int) -> list[Block]:
        seen = keys[max(boundary - self.num_seen, 0) : boundary]
        found = [self.index.find(key) for key in seen]
        return [block for block in found if block is not None]

    def num_needed(self, handle: int, num_blocks: int, boundary: int, num_hits: int) -> int:
        if (held := self._held.get(handle)) is not None:
            return num_blocks - held.end
        # It takes them step by step, and lets go of the first ones before it takes the last ones.
        return min(num_blocks - boundary, self._most - num_hits)

    def admit(
        self, handle: int, boundary: int, hits: Sequence[Block], boundaries: Collection[int]
    ) -> None:
        self.pool.hold(hits)
        self._held[handle] = _Held(boundary - len(hits), hits, boundaries)

    def allocate(self, handle: int, num_blocks: int, start: int) -> list[int]:
        held = self._held[handle]
        if (num_new := num_blocks - held.end) > 0:
            held.blocks += self.pool.take(num_new)
        # Tables have a place for every block of a request, whether it is held or not.
        missing = max(held.first - start, 0)
        own = held.blocks[max(start - held.first, 0) :]
        return [0] * missing + [block.block_id for block in own]

    def register(
        self, handle: int, start: int, parent: BlockKey | None, keys: Sequence[BlockKey]
    ) -> None:
        held = self._held[handle]
        added: list[BlockKey] = []  # consecutive ones that were not findable before
        before, previous = parent, parent
        for number, key in enumerate(keys, start):
            # Blocks that have left the window were registered before, or are another's by now.
            if number < max(held.num_registered, held.first):
                previous = key
                continue
            block, other = held.blocks[number - held.first], self.index.get(key)
            if other is None:
                before = before if added else previous
                added.append(key)
            else:
                if added:
                    self._events.stored(before, added)
                    added = []
            # The copy that somebody holds stays the findable one.
            if other is None or other.key is not key or not other.ref_count:
                # The other is free, or of a prefix whose block in the primary group was evicted.
                self.index.put(key, block)
                if other is not None and other.ref_count == 0:
                    self.pool.reuse_first(other)
            previous = key
        if added:
            self._events.stored(before, added)
        held.num_registered = max(held.num_registered, start + len(keys))

    def leave(self, handle: int, num_computed: int) -> list[list[Block]]:
        held = self._held[handle]
        # A block leaves when its last token is before the first one that is seen.
        num_left = max(num_computed - self.group.window + 1, 0) // self._block_size - held.first
        if num_left <= 0:
            return [[], []]
        left, held.blocks = held.blocks[:num_left], held.blocks[num_left:]
        parts: list[list[Block]] = [[], []]
        for number, block in enumerate(left, held.first):
            parts[not self._is_kept(number, held.boundaries)].append(block)
        held.first += num_left
        return parts

    def pop(self, handle: int) -> list[Block]:
        held = self._held.pop(handle, None)
        return held.blocks if held else []

    def _is_kept(self, number: int, boundaries: Collection[int]) -> bool:
        """Whether a block is in the window of some checkpoint behind it."""
        ends = *boundaries, *self._early, (number // self._stride + 1) * self._stride
        return any(end - self.num_seen <= number < end for end in ends)
