"""The block pool: every KV block, its reference count, and the free list in eviction order.

The free list is an intrusive doubly linked list, so a block that is found again by the prefix index
leaves its middle in O(1). Eviction is lazy: a freed block keeps its content until its memory is
taken. Blocks without content are taken first, then those with, least recently used first.

The loops here run once per block and are the cost of a long prompt: they stay free of calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from nanocore.kv_cache.block_key import BlockKey


class Block:
    """One KV block's bookkeeping; the memory is the workers' slice number `block_id`.

    key: its content, while the prefix index finds it under that. parent: the key of the block
    before it in the prefix, or None if it is the first.
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
        on_evict: called with cached blocks whose memory is about to be taken.

    num_gains: grows when somebody who did not fit may fit, unless more of the prefix is found: when
    blocks become free, and when a held block takes the place of a free one with the same content.
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
        """`count` blocks from the head of the free list, each with a reference count of 1."""
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
        if evicted:
            self._on_evict(evicted)
        head = block.next
        self._ends.next, head.prev = head, self._ends
        self.num_free -= count
        return taken

    def hold(self, blocks: Sequence[Block]) -> None:
        """Hold blocks that others hold, or that are free with their content still there."""
        for block in blocks:
            if block.ref_count == 0:
                before, after = block.prev, block.next
                before.next, after.prev = after, before
                self.num_free -= 1
            block.ref_count += 1

    def release(self, blocks: Iterable[Block]) -> None:
        """Drop one reference to each block.

        Pass a request's blocks last first: its tail is then evicted before its prefix, which other
        requests are likelier to share.
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

    def take_next(self, block: Block) -> None:
        """Move a free block to the head of the free list, because its content is worthless now."""
        assert block.ref_count == 0
        self.num_gains += 1
        before, after = block.prev, block.next
        before.next, after.prev = after, before
        ends = self._ends
        head = ends.next
        block.prev, block.next = ends, head
        ends.next = head.prev = block

    def free_ids(self) -> list[int]:
        """Ids of the free blocks, next to be taken first."""
        ids = []
        block = self._ends.next
        while block is not self._ends:
            ids.append(block.block_id)
            block = block.next
        return ids
