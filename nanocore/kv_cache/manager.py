"""The KVCacheManager: which blocks a request holds, and which cached blocks it can share.

Owned by the scheduler, on the step loop's thread. A request is known here by its handle, from its
first `allocate` to its `free`. A failed allocation changes nothing. Freed blocks that a step in
flight may still write or read are fenced: they are not handed out until that step is complete.

Layers that keep the same tokens are a group, with blocks of its own. The primary group keeps all
tokens of a request, and its blocks are the nodes of the prefix index; others keep less (`groups`).
All groups have the same block size and the same keys. In a model that has nothing but windows the
primary group's blocks have no memory.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from typing import Final

import msgspec

from nanocore.kv_cache.block_key import BlockKey
from nanocore.kv_cache.block_pool import Block, BlockPool, NodePool
from nanocore.kv_cache.capacity import Capacity
from nanocore.kv_cache.events import EventLog, GroupEvents, KVEventSubscriber
from nanocore.kv_cache.groups import Groups
from nanocore.kv_cache.prefix_index import PrefixIndex
from nanocore.kv_cache.slab_pool import Need, SlabArena, SlabPool
from nanocore.kv_cache.stats import PrefixCacheStats


class Prefix(msgspec.Struct, frozen=True):
    """A request's longest cached prefix that every group can serve.

    blocks: of the primary group. seen: of each other group, the blocks before its end that the next
    token sees. num_lost: blocks behind them that the primary group has, and lost_group has not.
    num_soon: how many of these it will have when the step that is being planned is over.
    """

    blocks: list[Block]
    seen: Sequence[list[Block]] = ()
    num_lost: int = 0
    lost_group: str = ""
    num_soon: int = 0


NO_PREFIX: Final = Prefix([])


class _Holding:
    """A request's blocks in the order of its tokens.

    num_registered: number of leading blocks that were registered in the prefix index.
    last_key: key of the last of them; if another block with equal content is the findable one,
        that block's key object.
    """

    __slots__ = ("blocks", "last_key", "num_registered")

    def __init__(self) -> None:
        self.blocks: list[Block] = []
        self.num_registered = 0
        self.last_key: BlockKey | None = None


_NODES_PER_BLOCK: Final = 8
"""Nodes without memory that are kept for each slab, so that long prefixes are found again."""

_Left = tuple[BlockPool | SlabPool, list[Block], bool]
"""Blocks of any pool that a request has left: see `groups.Left`."""


class KVCacheManager:
    """Allocates fixed-size blocks to requests and finds cached prefixes.

    Args:
        capacity: the memory. Of its groups one that keeps all tokens is the first, if there is
            one, and no two are the same.
        enable_prefix_caching: whether full blocks are registered and looked up.

    pool: blocks of the primary group; only the manager takes and releases them. is_compact: if set,
    a request takes no slab as long as a pool has free blocks in others, even if that evicts some.
    """

    def __init__(
        self,
        capacity: Capacity,
        enable_prefix_caching: bool = True,
    ) -> None:
        self.capacity = capacity
        self.groups = groups = capacity.groups
        self.num_slabs = num_slabs = capacity.num_slabs
        self.block_size = capacity.block_size
        self.num_blocks = capacity.num_blocks
        self.enable_prefix_caching = enable_prefix_caching
        self.is_compact = False
        self.stats = PrefixCacheStats()
        self._index = PrefixIndex()
        self._holdings: dict[int, _Holding] = {}
        self._fenced: deque[tuple[int, list[_Left]]] = deque()  # by the last step that uses them
        self._completed_step = 0
        self._log: EventLog | None = None  # until there is a subscriber
        self._arena: SlabArena | None = None
        self._others: Groups | None = None
        self._has_memory = groups[0].keeps_all  # the primary group
        is_alone = len(groups) == 1
        events = [GroupEvents(None if is_alone else number) for number in range(len(groups))]
        # Of the primary group; blocks without memory are nobody's to know.
        self._primary_events = events[0] if self._has_memory else GroupEvents(None)
        self._events = events
        self.pool: BlockPool | SlabPool
        if len(groups) == 1 and self._has_memory:
            self.pool = BlockPool(num_slabs, on_evict=self._forget)
            return
        self._arena = SlabArena(num_slabs)
        # The prefix index needs blocks to chain keys by, even if no layer keeps all tokens.
        self.pool = NodePool(_NODES_PER_BLOCK * num_slabs, on_evict=self._forget)
        if self._has_memory:
            self.pool = SlabPool(self._arena, groups[0].per_slab, self._forget)
        others = list(zip(groups, events, strict=True))[self._has_memory :]
        self._others = Groups(others, capacity, self._arena)

    @property
    def has_windows(self) -> bool:
        """Whether requests have blocks to leave: see `leave_window`."""
        return self._others is not None

    @property
    def pools(self) -> Sequence[BlockPool | SlabPool]:
        """Pools of the groups, in their order."""
        return [self.pool] if self._arena is None else self._arena.pools

    @property
    def blocks_by_group(self) -> list[tuple[str, int, int]]:
        """Name of each group, its blocks if it had all of the memory, and those it could have."""
        named = zip(self.groups, self.pools, strict=True)
        return [(group.name, len(pool.blocks), pool.num_free) for group, pool in named]

    @property
    def num_free_blocks(self) -> int:
        """Blocks that could be handed out; cached ones among them can still be hit."""
        if self._arena is None:
            return self.pool.num_free
        return sum([pool.num_free for pool in self._arena.pools])

    @property
    def num_gains(self) -> int:
        """Grows whenever a request that did not fit may fit now: see `BlockPool`."""
        if self._arena is None:
            return self.pool.num_gains
        return sum([pool.num_gains for pool in self._arena.pools])

    @property
    def num_cached_blocks(self) -> int:
        """Blocks that can be found, held or free."""
        pools = {self.pool, *self.pools}
        return sum(block.key is not None for pool in pools for block in pool.blocks)

    @property
    def usage(self) -> float:
        """Held share of the memory, 0 to 1."""
        return 1.0 - self.num_free_blocks / self.num_blocks

    def block_ids(self, handle: int, group: int = 0) -> list[int]:
        """Return the ids of a group's blocks that a request holds, in the order of its tokens."""
        if self._others is not None and (group or not self._has_memory):
            return self._others.block_ids(handle, self.groups[group])
        holding = self._holdings.get(handle)
        return [block.block_id for block in holding.blocks] if holding else []

    def begin_step(self) -> None:
        """Let what earlier steps compute be found: a further one is being planned."""
        if self._others is not None:
            self._others.begin_step()

    def find_prefix(self, keys: Sequence[BlockKey], num_tokens: int) -> Prefix:
        """Return a request's longest cached prefix.

        It has at most num_tokens - 1 tokens: the last one must be computed for its logits.
        """
        if not self.enable_prefix_caching:
            return NO_PREFIX
        blocks = self._index.find_prefix(keys[: (num_tokens - 1) // self.block_size])
        if self._others is None or not blocks:
            return Prefix(blocks)
        found = [block.key for block in blocks if block.key is not None]
        boundary, lost_group = self._others.last_boundary(found)
        seen = self._others.seen(found, boundary)
        num_lost = len(blocks) - boundary
        soon = self._others.last_boundary(found, soon=True)[0] if num_lost else boundary
        return Prefix(blocks[:boundary], seen, num_lost, lost_group, soon - boundary)

    def is_findable(self, key: BlockKey) -> bool:
        """Whether a block with this digest is cached; collisions count."""
        return self._index.get(key) is not None

    def can_allocate(
        self,
        handle: int,
        num_tokens: int,
        prefix: Prefix = NO_PREFIX,
        num_reserved: int = 0,
        released: Collection[int] = (),
        with_fenced: bool = False,
    ) -> bool:
        """Whether `allocate` would succeed, and leave num_reserved slabs free.

        released, with_fenced: as if these requests' blocks and the fenced ones were free. That is
        an estimate, on the hopeful side: a shared block is counted once for each holder.
        """
        if self._arena is not None:
            needs = self._needs(handle, num_tokens, prefix, released, with_fenced)
            return self._arena.num_left(needs) >= num_reserved
        num_available = self.pool.num_free - num_reserved
        num_blocks = -(-num_tokens // self.block_size)
        # If even all blocks fit, the held ones among many hits need not be counted.
        if num_blocks <= num_available:
            return True
        num_available += sum([len(self._holdings[one].blocks) for one in released])
        if with_fenced:
            num_available += self._num_fenced(self.pool)
        holding, hits = self._holdings.get(handle), prefix.blocks
        num_held = len(holding.blocks) if holding else sum([hit.ref_count > 0 for hit in hits])
        return num_blocks - num_held <= num_available

    def allocate(
        self,
        handle: int,
        num_tokens: int,
        prefix: Prefix = NO_PREFIX,
        num_prompt_tokens: int = 0,
    ) -> list[int] | None:
        """Let a request hold blocks for its first `num_tokens` tokens, as far as groups keep them.

        prefix, num_prompt_tokens: for a request that holds nothing yet.
        Returns the ids of the added blocks, hits included, group after group; each has as many,
        with 0 or `NO_STATE` in place of blocks that it does not hold. None: too few are free.
        """
        holding, hits = self._holdings.get(handle), prefix.blocks
        if holding is not None and self._arena is None:  # a step's rows that cross: be quick
            if (num_new := -(-num_tokens // self.block_size) - len(holding.blocks)) <= 0:
                return []
            if num_new > self.pool.num_free:
                return None
            new = self.pool.take(num_new)
            holding.blocks += new
            return [block.block_id for block in new]
        # All or nothing: the checks come before anything is changed.
        if self._arena is not None:
            num_left = self._arena.num_left(self._needs(handle, num_tokens, prefix))
            if num_left < 0:
                return None
            # What pools may take instead of evicting.
            self._arena.num_spare = 0 if self.is_compact else num_left
        elif not self.can_allocate(handle, num_tokens, prefix):
            return None
        if holding is None:
            holding = self._holdings[handle] = _Holding()
            # All hits before any `take`, which could evict them.
            if hits:
                self.pool.hold(hits)
                holding.blocks += hits
                holding.num_registered = len(hits)
                holding.last_key = hits[-1].key
            if self._others is not None:
                parted = len(hits) + prefix.num_lost
                self._others.admit(handle, len(hits), prefix.seen, num_prompt_tokens, parted)
            num_before = 0
        else:
            assert not hits, "a prefix is shared at admission only"
            num_before = len(holding.blocks)
        num_blocks, blocks = -(-num_tokens // self.block_size), holding.blocks
        if (num_new := num_blocks - len(blocks)) > 0:
            blocks += self.pool.take(num_new)
        added = [one.block_id for one in blocks[num_before:]] if self._has_memory else []
        for group in self._others or ():
            added += group.allocate(handle, num_blocks, num_before)
        return added

    def register(self, handle: int, keys: Sequence[BlockKey], num_full: int) -> None:
        """Register a request's first `num_full` blocks in the prefix index.

        Called when a step that fills them is planned (or, for decodes, when the next block is
        needed), not when it is done: all KV writes of a layer precede its reads, so even a request
        admitted in the same step may share them.
        """
        holding = self._holdings[handle]
        start = holding.num_registered
        if not self.enable_prefix_caching or start >= num_full:
            return
        blocks, parent = holding.blocks, holding.last_key
        before = start, parent
        known: list[BlockKey] | None = None if self._others is None else []
        while start < num_full:
            num_put = self._index.put(blocks[start:num_full], parent, keys[start:num_full])
            if num_put:
                if self._log is not None:
                    self._primary_events.stored(parent, keys[start : start + num_put])
                if known is not None:
                    known += keys[start : start + num_put]
                start += num_put
                parent = keys[start - 1]
            if start < num_full:  # `put` stopped at a digest that is in the index already
                parent = self._register_known(blocks[start], parent, keys[start])
                if known is not None:
                    known.append(parent)
                start += 1
        holding.num_registered, holding.last_key = num_full, parent
        for group in self._others or ():
            group.register(handle, *before, known or ())

    def leave_window(self, handle: int, num_computed: int, after_step: int = 0) -> None:
        """Release a request's blocks that its tokens from num_computed on do not see.

        after_step: the last step that may read them.
        """
        assert self._others is not None
        left = self._others.leave(handle, num_computed)
        self._release([one for one in left if one[1]], after_step)

    def forget(self, handle: int) -> None:
        """Remove a request's blocks from the prefix index, shared ones included: it is damaged."""
        holding = self._holdings.get(handle)
        if holding is None:
            return
        if cached := [block for block in holding.blocks if block.key is not None]:
            self._forget(cached)
        for group in self._others or ():
            group.index.forget([block for block in group.blocks(handle) if block.key is not None])

    def free(self, handle: int, after_step: int = 0) -> None:
        """Release all blocks of a request; cached content stays findable until it is evicted.

        after_step: the last step that may still write them; until it is complete they are fenced:
            not handed out, but still found by others.
        """
        holding = self._holdings.pop(handle, None)
        if holding is None:
            return
        # Blocks go back last first: see `BlockPool.release`.
        left: list[_Left] = [(self.pool, holding.blocks[::-1], False)]
        left += [(group.pool, group.pop(handle)[::-1], False) for group in self._others or ()]
        self._release(left, after_step)

    def complete(self, step: int) -> None:
        """Release the blocks that were fenced for steps up to this one."""
        self._completed_step = step
        while self._fenced and self._fenced[0][0] <= step:
            self._release(self._fenced.popleft()[1])

    def reset_prefix_cache(self) -> bool:
        """Empty the prefix index. Returns False, and does nothing, while any block is held."""
        # Holders chain new keys to those of their first blocks, which would be missing.
        if self._holdings or self._fenced:
            return False
        self._index.clear()
        for group in self._others or ():
            group.index.clear()
        for pool in () if self._arena is None else self._arena.pools:
            pool.clear()
        if self._log is not None:
            self._log.cleared()
        return True

    def subscribe(self, subscriber: KVEventSubscriber) -> None:
        """Call `subscriber` with changes of the prefix cache, at every `publish_events`."""
        if self._log is None:
            self._log = EventLog(self.block_size)
            for events in self._events:
                events.log = self._log
        self._log.subscribers.append(subscriber)

    def publish_events(self) -> None:
        """Send the events since the last call to the subscribers, as one batch."""
        if self._log is not None:
            self._log.publish()

    def _register_known(self, block: Block, parent: BlockKey | None, key: BlockKey) -> BlockKey:
        """Register a block whose digest is in the index already; returns its content's key."""
        other = self._index.get(key)
        assert other is not None
        other_key = other.key
        assert other_key is not None
        is_copy = other.parent is parent and other_key[1] == key[1]
        # A held copy stays the findable one: its holders keep it from eviction. The block here is
        # an unregistered duplicate, since block ids in running block tables must not change.
        if is_copy and other.ref_count:
            return other_key
        # A free copy may be evicted at any time, while this block is held: it takes its place. The
        # same goes for a block of other content (a collision, or one whose parent was evicted, so
        # that no lookup can reach it any more).
        self._index.remove([other])
        if is_copy:
            # The old key object, not an equal one: the blocks that follow in the index compare
            # their parent by identity.
            key = other_key
        else:
            self._primary_events.removed([other_key])
            self._primary_events.stored(parent, [key])
        self._index.put([block], parent, [key])
        if other.ref_count == 0:
            self.pool.reuse_first(other)  # its content is worthless now, so it is reused first
        return key

    def _forget(self, blocks: list[Block]) -> None:
        self._primary_events.removed([block.key for block in blocks if block.key])
        self._index.remove(blocks)

    def _release(self, left: list[_Left], after_step: int = 0) -> None:
        if after_step > self._completed_step:
            self._fenced.append((after_step, left))
            return
        for pool, blocks, is_last_use in left:
            pool.release(blocks, is_last_use)

    def _needs(
        self,
        handle: int,
        num_tokens: int,
        prefix: Prefix,
        released: Collection[int] = (),
        with_fenced: bool = False,
    ) -> list[Need]:
        num_blocks, boundary = -(-num_tokens // self.block_size), len(prefix.blocks)
        needs: list[Need] = []
        if isinstance(self.pool, SlabPool):
            holding = self._holdings.get(handle)
            num_new = num_blocks - (len(holding.blocks) if holding else boundary)
            num_soon = sum([len(self._holdings[one].blocks) for one in released])
            needs.append(Need(self.pool, num_new, prefix.blocks, num_soon))
        assert self._others is not None
        needs += self._others.needs(handle, num_blocks, boundary, prefix.seen, released)
        if not with_fenced:
            return needs
        return [one._replace(num_soon=one.num_soon + self._num_fenced(one.pool)) for one in needs]

    def _num_fenced(self, pool: BlockPool | SlabPool) -> int:
        """Count references to a pool's fenced blocks."""
        return sum([len(own) for _, left in self._fenced for of, own, _ in left if of is pool])
