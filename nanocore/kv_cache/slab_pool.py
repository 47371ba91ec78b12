"""Pools of several groups in one memory: it is cut into slabs, each lent to one pool at a time.

Blocks of different groups differ in size, and which group needs how much depends on the requests:
short chats fill windows, long ones full attention. A slab holds a whole number of blocks of any
group. A pool takes slabs as it needs blocks, and a slab in which nobody holds a block can become
any pool's; so there is no split to choose in advance, and a block's address follows from its id
alone, as if all of the memory had blocks of that one size (slabs: Bonwick 1994).
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Final, NamedTuple

from nanocore.kv_cache.block_pool import Block

_WORTHLESS: Final = 0
"""Age of an empty slab with nothing that is likely to be needed again; others have a tick above."""


class Need(NamedTuple):
    """What a request needs of a pool: blocks, and cached ones to keep.

    num_soon: blocks that count as free, because others are about to release them.
    """

    pool: SlabPool
    num_new: int
    hits: Sequence[Block]
    num_soon: int = 0


class SlabArena:
    """Memory of num_slabs slabs.

    free: slabs that no pool has. pools: that share it. num_spare: empty slabs beyond those that
    requests are about to take for want of blocks; one is rather taken than that a cached block
    is evicted. tick: counts releases.
    """

    def __init__(self, num_slabs: int) -> None:
        self.num_slabs = num_slabs
        self.free = list(range(num_slabs - 1, -1, -1))
        self.pools: list[SlabPool] = []
        self.num_spare = 0
        self.tick = _WORTHLESS

    @property
    def num_empty(self) -> int:
        """Slabs in which nobody holds a block."""
        return len(self.free) + sum([len(pool.empty) for pool in self.pools])

    def num_left(self, needs: Sequence[Need]) -> int:
        """Return how many empty slabs are left when these needs are met; below 0: they are not."""
        num_left = self.num_empty
        for pool, num_new, hits, num_soon in needs:
            num_free, opened = pool.num_partial + num_soon, set[int]()
            for block in hits:
                if block.ref_count:
                    continue
                num_free -= 1
                # A hit in an empty slab takes that slab, whose other blocks can then be used.
                if (slab := pool.slab(block)) in pool.empty and slab not in opened:
                    opened.add(slab)
                    num_free += pool.per_slab
            num_left -= len(opened) + max(-(-(num_new - num_free) // pool.per_slab), 0)
            # On the hopeful side: what is released soon leaves as many slabs empty as it can.
            if num_soon and num_free > num_new:
                num_left += min(num_free - num_new, num_soon) // pool.per_slab
        return num_left

    @property
    def oldest_age(self) -> float:
        """Age of the slab that `take` would take, in ticks; infinite if there is none."""
        if self.free:
            return _WORTHLESS
        ages = [next(iter(pool.empty.values())) for pool in self.pools if pool.empty]
        return min(ages, default=math.inf)

    def take(self) -> int:
        """Take an empty slab without cached blocks, or else the one that was used longest ago."""
        # Other pools' cached blocks are no better than one's own: only age decides. A slab that was
        # used goes before one that never was: the system would have to clear that one's memory.
        ages = {
            next(iter(pool.empty.values())): pool for pool in reversed(self.pools) if pool.empty
        }
        if not self.free or _WORTHLESS in ages:
            ages[min(ages)].give_up()
        return self.free.pop()


class SlabPool:
    """Blocks of one group: hands them out and takes them back, as `BlockPool` does.

    Args:
        per_slab: blocks of a slab. on_evict: see `BlockPool`.

    empty: own slabs in which nobody holds a block, with their ages, the oldest first.
    """

    def __init__(
        self, arena: SlabArena, per_slab: int, on_evict: Callable[[list[Block]], None]
    ) -> None:
        self.blocks = [Block(i) for i in range(arena.num_slabs * per_slab)]
        self.num_gains = 0
        self.per_slab = per_slab
        self.empty: OrderedDict[int, int] = OrderedDict()
        self._arena = arena
        self._on_evict = on_evict
        self._num_held = [0] * arena.num_slabs
        # Free blocks of slabs in which somebody holds a block, and their ages, by id: those to be
        # reused at once, and those whose content may be needed, the oldest first.
        self._unused: dict[int, int] = {}
        self._cached: dict[int, int] = {}
        arena.pools.append(self)

    @property
    def num_free(self) -> int:
        """Blocks that the pool could hand out, if no other took slabs."""
        return self.num_partial + self._arena.num_empty * self.per_slab

    @property
    def num_partial(self) -> int:
        """Free blocks of slabs in which somebody holds a block."""
        return len(self._unused) + len(self._cached)

    def slab(self, block: Block) -> int:
        return block.block_id // self.per_slab

    def take(self, count: int) -> list[Block]:
        """Take `count` blocks, with a reference count of 1 each."""
        taken: list[Block] = []
        while len(taken) < count:
            # What was used longest ago goes first, be it a block of its own or a slab, as long as
            # no request needs that slab.
            if not self._unused and self._arena.num_spare > 0:
                own_age = next(iter(self._cached.values()), math.inf)
                if self._arena.oldest_age < own_age:
                    self._arena.num_spare -= 1
                    self._adopt(self._arena.take())
            if not (self._unused or self._cached):
                self._adopt(self._arena.take())
            free = self._unused or self._cached
            block = self.blocks[next(iter(free))]
            del free[block.block_id]
            block.ref_count = 1
            self._num_held[self.slab(block)] += 1
            taken.append(block)
        self._evict(taken)
        return taken

    def hold(self, blocks: Sequence[Block]) -> None:
        """Add a reference to blocks that others hold, or that are free and still cached."""
        for block in blocks:
            if block.ref_count == 0:
                slab = self.slab(block)
                # Then no other pool may take the slab any more.
                if slab in self.empty:
                    del self.empty[slab]
                    self._adopt(slab)
                self._remove(block)
                self._num_held[slab] += 1
            block.ref_count += 1

    def release(self, blocks: Iterable[Block], is_last_use: bool = False) -> None:
        """Drop one reference to each block. is_last_use: nobody is likely to need them again."""
        self._arena.tick += 1
        for block in blocks:
            block.ref_count -= 1
            if block.ref_count:
                assert block.ref_count > 0, f"{block} is released more often than held"
                continue
            self.num_gains += 1
            slab = self.slab(block)
            self._num_held[slab] -= 1
            is_cached = block.key is not None and not is_last_use
            (self._cached if is_cached else self._unused)[block.block_id] = self._arena.tick
            # Any pool may take it from now on, so it offers its blocks together.
            if self._num_held[slab] == 0:
                is_any_cached = False
                for one in self._blocks_of(slab):
                    is_any_cached |= self._remove(one)
                self._leave_empty(slab, is_any_cached)

    def reuse_first(self, block: Block) -> None:
        """Have a free block reused before others: it was removed from the index."""
        self.num_gains += 1
        slab = self.slab(block)
        if slab not in self.empty:
            self._cached.pop(block.block_id, None)
            self._unused[block.block_id] = _WORTHLESS
        elif all(one.key is None for one in self._blocks_of(slab)):
            self._leave_empty(slab, is_cached=False)

    def give_up(self) -> None:
        """Give the oldest empty slab back to the arena; what was cached there is evicted."""
        slab, _ = self.empty.popitem(last=False)
        self._evict(self._blocks_of(slab))
        self._arena.free.append(slab)

    def clear(self) -> None:
        """Nothing that is cached is needed any more, and nobody holds a block."""
        assert not self._unused
        assert not self._cached
        self.empty = OrderedDict.fromkeys(self.empty, _WORTHLESS)

    def _adopt(self, slab: int) -> None:
        tick = self._arena.tick
        for block in self._blocks_of(slab):
            (self._cached if block.key is not None else self._unused)[block.block_id] = tick

    def _leave_empty(self, slab: int, is_cached: bool) -> None:
        # The oldest is the first: those with nothing to lose are put before all others.
        self.empty[slab] = self._arena.tick if is_cached else _WORTHLESS
        self.empty.move_to_end(slab, last=is_cached)

    def _remove(self, block: Block) -> bool:
        """Take a free block out; whether its content may be needed."""
        if self._unused.pop(block.block_id, None) is not None:
            return False
        del self._cached[block.block_id]
        return True

    def _evict(self, blocks: list[Block]) -> None:
        if cached := [block for block in blocks if block.key is not None]:
            self._on_evict(cached)

    def _blocks_of(self, slab: int) -> list[Block]:
        return self.blocks[slab * self.per_slab : (slab + 1) * self.per_slab]
