"""The block pool: every KV block, its reference count, and the free list in eviction order.

The free list is an intrusive doubly linked list, so a prefix hit takes a free block out of its
middle in O(1). Eviction is lazy: a freed block keeps its content until its memory is needed. Blocks
without cached content are taken first, then cached ones, least recently used first (as in vLLM V1).

The loops here run once per block, which dominates the cost of a long prompt: they make no calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from nanocore.kv_cache.block_key import BlockKey


class Block:
    """One KV block; its memory is slice `block_id` of the workers' KV memory.

    key: key of its content while it is in the prefix index, else None. parent: key of the block
    before it in the prefix; None if it is the first.
    """

    __slots__ = ("block_id", "key", "next", "parent", "prev", "ref_count")

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.ref_count = 0
        self.key: BlockKey | None = None
        self.parent: BlockKey | None = None
        self.prev: Block = self
        self.next: Block = self

    def __repr__(self) -> str:
        state = f"held by {self.ref_count}" if self.ref_count else "free"
        return f"Block({self.block_id}, {state}{', cached' if self.key else ''})"


class BlockPool:
    """Hands out blocks and takes them back.

    Args:
        num_blocks: blocks in the pool, ids 0 to num_blocks - 1.
        on_evict: called with cached blocks whose memory is about to be reused.

    num_gains: grows whenever a request that did not fit may fit now: when blocks become free, and
        when a held block replaces a free one in the prefix index. While it is unchanged, only more
        prefix hits can make a request fit.
    """

    def __init__(self, num_blocks: int, on_evict: Callable[[list[Block]], None]) -> None:
        self.blocks = [Block(i) for i in range(num_blocks)]
        self.num_free = num_blocks
        self.num_gains = 0
        self._on_evict = on_evict
        self._ends = Block(-1)  # both ends of the circular free list: next is head, prev is tail
        last = self._ends
        for block in self.blocks:
            last.next, block.prev = block, last
            last = block
        last.next, self._ends.prev = self._ends, last

    def take(self, count: int) -> list[Block]:
        """Take `count` blocks from the head of the free list, with a reference count of 1 each."""
        assert count <= self.num_free, "callers check num_free first: a failed take touches nothing"
        taken = []
        evicted = []
        block = self._ends
        for _ in range(count):
            block = block.next
            block.ref_count = 1
            taken.append(block)
            if block.key is not None:
                evicted.append(block)
        if evicted:  # one call for all of them
            self._on_evict(evicted)
        head = block.next
        self._ends.next, head.prev = head, self._ends
        self.num_free -= count
        return taken

    def hold(self, blocks: Sequence[Block]) -> None:
        """Add a reference to blocks that others hold, or that are free and still cached."""
        for block in blocks:
            if block.ref_count == 0:  # it lies in the free list
                before, after = block.prev, block.next
                before.next, after.prev = after, before
                self.num_free -= 1
            block.ref_count += 1

    def release(self, blocks: Iterable[Block], is_last_use: bool = False) -> None:
        """Drop one reference to each block.

        Pass a request's blocks last first: then its tail is evicted before its prefix, which other
        requests are likelier to share. is_last_use: as `SlabPool` needs it.
        """
        ends = self._ends
        num_freed = 0
        for block in blocks:
            ref_count = block.ref_count = block.ref_count - 1
            if ref_count:
                assert ref_count > 0, f"{block} is released more often than held"
            else:
                # Tail: evicted last. Head: taken next, while its memory is still warm.
                after = ends if block.key is not None else ends.next
                before = after.prev
                block.prev, block.next = before, after
                before.next = after.prev = block
                num_freed += 1
        self.num_free += num_freed
        self.num_gains += num_freed

    def reuse_first(self, block: Block) -> None:
        """Move a free block to the head of the free list: it was removed from the index."""
        assert block.ref_count == 0
        self.num_gains += 1
        before, after = block.prev, block.next
        before.next, after.prev = after, before
        ends = self._ends
        head = ends.next
        block.prev, block.next = ends, head
        ends.next = head.prev = block


class NodePool(BlockPool):
    """Blocks without memory, the nodes of prefixes where no group keeps all tokens. It never runs
    out, and keeps max_free of those that nobody holds.
    """

    def __init__(self, max_free: int, on_evict: Callable[[list[Block]], None]) -> None:
        super().__init__(0, on_evict)
        self._max_free = max_free

    def take(self, count: int) -> list[Block]:
        num_new = count - max(self.num_free - self._max_free, 0)
        if num_new > 0:
            new = [Block(len(self.blocks) + i) for i in range(num_new)]
            self.blocks += new
            for block in new:
                block.ref_count = 1
            self.release(reversed(new))  # to the head, since they have no keys
        return super().take(count)
