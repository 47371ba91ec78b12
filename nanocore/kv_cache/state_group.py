"""States of layers that carry one from token to token: short convolutions, recurrences.

A state stands for all tokens before it, so a request needs one alone, at its last token. It lies in
the block of that token: a step reads it from the block of the last computed token, and writes it to
the block of the last one that it computes, and on its way to blocks that others may go on from
(checkpoints). The other blocks of a request have no memory. A block with its last token's state is
findable under the key of the primary group's block, so a hit goes on behind it and copies nothing:
the request reads the shared state and writes the next one to a block of its own.

Attention may read what the same step writes, since all K and V of a layer are written first. A
state is known only when the step is over: until the next step is planned it is not found.

A small state is kept at every boundary. A large one is kept at few: powers of two, which bound what
is computed again to as much as was found; where prompts end and where they have parted before
(Marconi: Pan et al. 2024).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from nanocore.kv_cache.block_key import BlockKey
from nanocore.kv_cache.block_pool import Block
from nanocore.kv_cache.capacity import CacheGroup, Capacity
from nanocore.kv_cache.events import GroupEvents
from nanocore.kv_cache.prefix_index import GroupIndex
from nanocore.kv_cache.slab_pool import SlabArena, SlabPool

NO_STATE = -1
"""In place of the id of a block without memory."""


class _Held:
    """A request's blocks by number. end: blocks before it have been allocated or passed."""

    __slots__ = ("blocks", "boundaries", "end")

    def __init__(self, end: int, boundaries: Collection[int]) -> None:
        self.blocks: dict[int, Block] = {}
        self.boundaries = boundaries
        self.end = end


class StateGroup:
    """Implements `Group`."""

    def __init__(
        self, group: CacheGroup, capacity: Capacity, arena: SlabArena, events: GroupEvents
    ) -> None:
        self.group = group
        self.index = GroupIndex(events)
        self.pool = SlabPool(arena, group.per_slab, self.index.forget)
        self._block_size = capacity.block_size
        self._most = group.most_blocks(2**31, capacity.block_size, capacity.max_step_tokens)
        self._events = events
        self._kept: set[int] = set()  # ids of findable blocks that are checkpoints; and old ones
        self._unfinished: set[bytes] = set()  # what the step that is planned last computes
        self._held: dict[int, _Held] = {}

    def begin_step(self) -> None:
        self._unfinished.clear()

    def blocks(self, handle: int) -> Sequence[Block]:
        held = self._held.get(handle)
        return list(held.blocks.values()) if held else ()

    def last_boundary(self, keys: Sequence[BlockKey], end: int, soon: bool = False) -> int:
        while end and self._find(keys[end - 1], soon) is None:
            end -= 1
        return end

    def seen(self, keys: Sequence[BlockKey], boundary: int) -> list[Block]:
        block = self._find(keys[boundary - 1]) if boundary else None
        return [] if block is None else [block]

    def num_needed(self, handle: int, num_blocks: int, boundary: int, num_hits: int) -> int:
        if (held := self._held.get(handle)) is not None:
            return len(self._written(held, num_blocks))
        return min(num_blocks - boundary, self._most - num_hits)

    def admit(
        self, handle: int, boundary: int, hits: Sequence[Block], boundaries: Collection[int]
    ) -> None:
        self.pool.hold(hits)
        held = self._held[handle] = _Held(boundary, boundaries)
        if hits:
            held.blocks[boundary - 1] = hits[0]

    def allocate(self, handle: int, num_blocks: int, start: int) -> list[int]:
        held = self._held[handle]
        numbers = self._written(held, num_blocks)
        held.blocks.update(zip(numbers, self.pool.take(len(numbers)), strict=True))
        held.end = max(held.end, num_blocks)
        own = held.blocks
        return [own[n].block_id if n in own else NO_STATE for n in range(start, num_blocks)]

    def register(
        self, handle: int, start: int, parent: BlockKey | None, keys: Sequence[BlockKey]
    ) -> None:
        held = self._held[handle]
        for number, key in enumerate(keys, start):
            block, other = held.blocks.get(number), self.index.get(key)
            before, parent = parent, key
            if block is None or block.key is not None:
                continue
            is_kept = self._is_checkpoint(held, number)
            if other is None:
                self._events.stored(before, [key])
            # Of copies one stays findable that is kept, and rather one that is held.
            elif other.key is key and (not is_kept or (other.ref_count and self._keeps(other))):
                continue
            self.index.put(key, block)
            # Else it is of a prefix whose block in the primary group was evicted.
            if other is not None and other.ref_count == 0:
                self.pool.reuse_first(other)
            self._unfinished.add(key[0])
            (self._kept.add if is_kept else self._kept.discard)(block.block_id)

    def leave(self, handle: int, num_computed: int) -> list[list[Block]]:
        held = self._held[handle]
        last = -(-num_computed // self._block_size) - 1  # has the state that is read next
        parts: list[list[Block]] = [[], []]
        for number in [n for n in held.blocks if n < last]:
            block = held.blocks.pop(number)
            parts[not (self._keeps(block) or self._is_checkpoint(held, number))].append(block)
        return parts

    def pop(self, handle: int) -> list[Block]:
        held = self._held.pop(handle, None)
        return list(held.blocks.values()) if held else []

    def _keeps(self, block: Block) -> bool:
        """Whether a block is findable, and a checkpoint of the request that computed it."""
        return block.key is not None and block.block_id in self._kept

    def _find(self, key: BlockKey, soon: bool = False) -> Block | None:
        return None if key[0] in self._unfinished and not soon else self.index.find(key)

    def _written(self, held: _Held, num_blocks: int) -> list[int]:
        """Numbers of the blocks up to num_blocks that need memory, if a step ends in the last."""
        numbers = range(held.end, num_blocks)
        return [n for n in numbers if n == num_blocks - 1 or self._is_checkpoint(held, n)]

    def _is_checkpoint(self, held: _Held, number: int) -> bool:
        """Whether others are likely to go on behind a block."""
        end, spacing = number + 1, self.group.spacing
        multiple = 0 if end % spacing else end // spacing
        is_power_of_two = multiple > 0 and not multiple & (multiple - 1)
        return spacing == 1 or is_power_of_two or end in held.boundaries
