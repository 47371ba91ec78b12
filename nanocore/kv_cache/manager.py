"""The KVCacheManager: which blocks a request holds, and which cached blocks it can share.

Owned by the scheduler, on the step loop's thread. A request is known here by its handle, from its
first `allocate` to its `free`. A failed allocation changes nothing. Freed blocks that a step in
flight may still write are fenced: they are not handed out until that step is complete.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from nanocore.kv_cache.block_key import BlockKey
from nanocore.kv_cache.block_pool import Block, BlockPool
from nanocore.kv_cache.events import EventLog, KVEventSubscriber
from nanocore.kv_cache.prefix_index import PrefixIndex
from nanocore.kv_cache.stats import PrefixCacheStats


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


class KVCacheManager:
    """Allocates fixed-size blocks to requests and finds cached prefixes.

    Args:
        num_blocks: blocks in the pool.
        block_size: tokens per block.
        enable_prefix_caching: whether full blocks are registered and looked up.

    pool: the blocks; only the manager takes and releases them.
    """

    def __init__(
        self, num_blocks: int, block_size: int, enable_prefix_caching: bool = True
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.stats = PrefixCacheStats()
        self._index = PrefixIndex()
        self.pool = BlockPool(num_blocks, on_evict=self._forget)
        self._holdings: dict[int, _Holding] = {}
        self._fenced: deque[tuple[int, list[Block]]] = deque()  # (last step that uses them, blocks)
        self._completed_step = 0
        self._events: EventLog | None = None  # until there is a subscriber

    @property
    def num_free_blocks(self) -> int:
        """Blocks that nobody holds; cached ones among them can still be hit."""
        return self.pool.num_free

    @property
    def num_fenced_blocks(self) -> int:
        """References to fenced blocks: a shared block counts once for each."""
        return sum(len(blocks) for _, blocks in self._fenced)

    @property
    def handles(self) -> list[int]:
        return list(self._holdings)

    @property
    def num_cached_blocks(self) -> int:
        """Blocks in the prefix index, held or free."""
        return len(self._index)

    @property
    def usage(self) -> float:
        """Held share of the pool, 0 to 1."""
        return 1.0 - self.pool.num_free / self.num_blocks

    def block_ids(self, handle: int) -> list[int]:
        """Return the ids of the blocks that a request holds, in the order of its tokens."""
        holding = self._holdings.get(handle)
        return [block.block_id for block in holding.blocks] if holding else []

    def find_prefix(self, keys: Sequence[BlockKey], num_tokens: int) -> list[Block]:
        """Return the blocks of a request's longest cached prefix.

        The prefix has at most num_tokens - 1 tokens: the last one must be computed for its logits.
        """
        if not self.enable_prefix_caching:
            return []
        return self._index.find_prefix(keys[: (num_tokens - 1) // self.block_size])

    def is_findable(self, key: BlockKey) -> bool:
        """Whether a block with this digest is cached; collisions count."""
        return self._index.get(key) is not None

    def num_free_needed(self, handle: int, num_tokens: int, hits: Sequence[Block] = ()) -> int:
        """Return exactly how many free blocks `allocate` with these arguments would take.

        A hit that nobody holds lies in the free list, so sharing it uses up free capacity, too.
        """
        holding = self._holdings.get(handle)
        num_held = len(holding.blocks) if holding else 0
        num_new = -(-num_tokens // self.block_size) - num_held
        return num_new - sum([block.ref_count > 0 for block in hits]) if hits else num_new

    def can_allocate(
        self, handle: int, num_tokens: int, hits: Sequence[Block] = (), num_reserved: int = 0
    ) -> bool:
        """Whether `allocate` would succeed, and leave num_reserved blocks free."""
        num_available = self.pool.num_free - num_reserved
        # If even all blocks fit, the held ones among many hits need not be counted.
        if -(-num_tokens // self.block_size) <= num_available:
            return True
        return self.num_free_needed(handle, num_tokens, hits) <= num_available

    def allocate(
        self, handle: int, num_tokens: int, hits: Sequence[Block] = ()
    ) -> list[int] | None:
        """Let a request hold blocks for its first `num_tokens` tokens.

        hits: blocks of its cached prefix; only for a request that holds nothing yet.
        Returns the ids of the added blocks, hits included, or None if too few are free.
        """
        # All or nothing: the checks come before anything is changed.
        if not self.can_allocate(handle, num_tokens, hits):
            return None
        holding = self._holdings.get(handle)
        if holding is None:
            holding = self._holdings[handle] = _Holding()
        blocks = holding.blocks
        assert not (blocks and hits), "a prefix is shared at admission only"
        num_before = len(blocks)
        if hits:
            # Before `take`: a free hit must leave the free list, or it could be taken and evicted.
            self.pool.hold(hits)
            blocks += hits
            holding.num_registered = len(hits)
            holding.last_key = hits[-1].key
        num_new = -(-num_tokens // self.block_size) - len(blocks)
        if num_new > 0:
            blocks += self.pool.take(num_new)
        return [block.block_id for block in blocks[num_before:]]

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
        while start < num_full:
            num_put = self._index.put(blocks[start:num_full], parent, keys[start:num_full])
            if num_put:
                if self._events is not None:
                    self._events.stored(parent, keys[start : start + num_put])
                start += num_put
                parent = keys[start - 1]
            if start < num_full:  # `put` stopped at a digest that is in the index already
                parent = self._register_known(blocks[start], parent, keys[start])
                start += 1
        holding.num_registered, holding.last_key = num_full, parent

    def forget(self, handle: int) -> None:
        """Remove a request's blocks from the prefix index, shared ones included: it is damaged."""
        holding = self._holdings.get(handle)
        if holding and (cached := [block for block in holding.blocks if block.key is not None]):
            self._forget(cached)

    def free(self, handle: int, after_step: int = 0) -> None:
        """Release all blocks of a request; cached content stays findable until it is evicted.

        after_step: the last step that may still write them; until it is complete they are fenced:
            not handed out, but still found by others.
        """
        holding = self._holdings.pop(handle, None)
        if holding is None:
            return
        # Blocks go back last first: see `BlockPool.release`.
        if after_step > self._completed_step:
            self._fenced.append((after_step, holding.blocks))
        else:
            self.pool.release(reversed(holding.blocks))

    def complete(self, step: int) -> None:
        """Release the blocks that were fenced for steps up to this one."""
        self._completed_step = step
        while self._fenced and self._fenced[0][0] <= step:
            self.pool.release(reversed(self._fenced.popleft()[1]))

    def reset_prefix_cache(self) -> bool:
        """Empty the prefix index. Returns False, and does nothing, while any block is held."""
        # Holders chain new keys to those of their first blocks, which would be missing.
        if self.pool.num_free < self.num_blocks:
            return False
        self._index.clear()
        if self._events is not None:
            self._events.cleared()
        return True

    def subscribe(self, subscriber: KVEventSubscriber) -> None:
        """Call `subscriber` with changes of the prefix cache, at every `publish_events`."""
        if self._events is None:
            self._events = EventLog(self.block_size)
        self._events.subscribers.append(subscriber)

    def publish_events(self) -> None:
        """Send the events since the last call to the subscribers, as one batch."""
        if self._events is not None:
            self._events.publish()

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
        elif self._events is not None:
            self._events.removed([other_key])
            self._events.stored(parent, [key])
        self._index.put([block], parent, [key])
        if other.ref_count == 0:
            self.pool.reuse_first(other)  # its content is worthless now, so it is reused first
        return key

    def _forget(self, blocks: list[Block]) -> None:
        if self._events is not None:
            self._events.removed([block.key for block in blocks if block.key])
        self._index.remove(blocks)
