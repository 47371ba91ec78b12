"""A kind of cache that is not there yet: layers with one state for all tokens before.

It shows that the manager and the scheduler know nothing of windows but through `Group`. A request
holds the block with its state, and snapshots that its step passes at every `stride` blocks; both
stay findable, and a hit needs nothing but the one at its end.
"""

from __future__ import annotations

from collections.abc import Sequence

from nanocore.kv_cache import Block, BlockKey, CacheGroup, Capacity
from nanocore.kv_cache.events import GroupEvents
from nanocore.kv_cache.groups import Group
from nanocore.kv_cache.slab_pool import SlabArena, SlabPool
from nanocore.kv_cache.window_group import WindowGroup


class StateGroup(CacheGroup, frozen=True):
    stride: int = 2

    @property
    def keeps_all(self) -> bool:
        return False

    def most_blocks(self, num_blocks: int, block_size: int, max_step_tokens: int) -> int:
        num_of_step = -(-max_step_tokens // block_size) + 1
        return min(num_blocks, 2 + num_of_step // self.stride + 1)

    def written(self, start: int, end: int) -> list[int]:
        """Which of the blocks from `start` to `end` have memory, if a step ends in the last one."""
        return [n for n in range(start, end) if (n + 1) % self.stride == 0 or n == end - 1]


class FakeStates:
    """Implements `Group`."""

    def __init__(
        self, group: CacheGroup, capacity: Capacity, arena: SlabArena, events: GroupEvents
    ) -> None:
        assert isinstance(group, StateGroup)
        self.group: StateGroup = group
        self.pool = SlabPool(arena, group.per_slab, self.forget)
        self.events = events
        self.block_size = capacity.block_size
        self.most = group.most_blocks(2**31, capacity.block_size, capacity.max_step_tokens)
        self.index: dict[bytes, Block] = {}
        self.held: dict[int, dict[int, Block]] = {}
        self.ends: dict[int, int] = {}

    def find(self, key: BlockKey) -> Block | None:
        block = self.index.get(key[0])
        return block if block is not None and block.key is key else None

    def blocks(self, handle: int) -> Sequence[Block]:
        return list(self.held.get(handle, {}).values())

    def last_boundary(self, keys: Sequence[BlockKey], end: int) -> int:
        return max([n for n in range(1, end + 1) if self.find(keys[n - 1])], default=0)

    def seen(self, keys: Sequence[BlockKey], boundary: int) -> list[Block]:
        block = self.find(keys[boundary - 1]) if boundary else None
        return [] if block is None else [block]

    def num_needed(self, handle: int, num_blocks: int, boundary: int, num_hits: int) -> int:
        if handle in self.held:
            return len(self.group.written(self.ends[handle], num_blocks))
        return min(num_blocks - boundary, self.most - num_hits)

    def admit(self, handle: int, boundary: int, hits: Sequence[Block]) -> None:
        self.pool.hold(hits)
        self.held[handle] = dict.fromkeys([boundary - 1], hits[0]) if hits else {}
        self.ends[handle] = boundary

    def allocate(self, handle: int, num_blocks: int, start: int) -> list[int]:
        own = self.held[handle]
        numbers = self.group.written(self.ends[handle], num_blocks)
        own.update(zip(numbers, self.pool.take(len(numbers)), strict=True))
        self.ends[handle] = max(self.ends[handle], num_blocks)
        return [own[n].block_id if n in own else 0 for n in range(start, num_blocks)]

    def register(
        self, handle: int, start: int, parent: BlockKey | None, keys: Sequence[BlockKey]
    ) -> None:
        for number, key in enumerate(keys, start):
            block = self.held[handle].get(number)
            other = self.index.get(key[0])
            if block is None or (other is not None and other.key is key and other.ref_count):
                continue
            if other is not None:
                other.key = None
                if other.ref_count == 0:
                    self.pool.reuse_first(other)
                self.events.removed([key])
            self.index[key[0]], block.key = block, key
            self.events.stored(parent if number == start else keys[number - start - 1], [key])

    def leave(self, handle: int, num_computed: int, boundaries: Sequence[int]) -> list[list[Block]]:
        own = self.held[handle]
        last = -(-num_computed // self.block_size) - 1
        parts: list[list[Block]] = [[], []]
        for number in [n for n in own if n < last]:
            is_kept = number + 1 in boundaries or (number + 1) % self.group.stride == 0
            parts[not is_kept].append(own.pop(number))
        return parts

    def pop(self, handle: int) -> list[Block]:
        self.ends.pop(handle, None)
        return list(self.held.pop(handle, {}).values())

    def forget(self, blocks: Sequence[Block]) -> None:
        self.events.removed([block.key for block in blocks if block.key is not None])
        self.remove(blocks)

    def clear(self) -> None:
        self.remove(list(self.index.values()))

    def remove(self, blocks: Sequence[Block]) -> None:
        for block in blocks:
            assert block.key is not None
            del self.index[block.key[0]]
            block.key = None


def open_group(
    group: CacheGroup, capacity: Capacity, arena: SlabArena, events: GroupEvents
) -> Group:
    """Groups of a model with windows and states."""
    kind = FakeStates if isinstance(group, StateGroup) else WindowGroup
    return kind(group, capacity, arena, events)
