"""The block pool: every KV block, its reference count, and the free list in eviction order.

The free list is an intrusive doubly linked list, so a block that is found again by the prefix index
leaves its middle in O(1). Eviction is lazy: a freed block keeps its content until its memory is
taken. Blocks without content are taken first, then those with, least recently used first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nanocore.kv_cache.prefix_index import BlockKey


class Block:
    """One KV block's bookkeeping; the memory is the workers' slice number `block_id`."""

    __slots__ = ("block_id", "content_id", "key", "next", "parent_id", "prev", "ref_count")

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.ref_count = 0
        self.key: BlockKey | None = None  # set while the prefix index knows the content
        self.content_id = -1
        self.parent_id = -1
        self.prev: Block = self
        self.next: Block = self

    def __repr__(self) -> str:
        state = f"held by {self.ref_count}" if self.ref_count else "free"
        return f"Block({self.block_id}, {state}{', cached' if self.key else ''})"


class BlockPool:
    """Hands out blocks and takes them back.

    Args:
        num_blocks: blocks in the pool, ids 0 to num_blocks - 1.
        on_evict: called with a cached block whose memory is about to be taken.
    """

    def __init__(self, num_blocks: int, on_evict: Callable[[Block], None]) -> None:
        self.blocks = [Block(i) for i in range(num_blocks)]
        self.num_free = 0
        self._on_evict = on_evict
        self._ends = Block(-1)  # both ends of the circular free list: next is head, prev is tail
        for block in self.blocks:
            self._insert_before(self._ends, block)

    def take(self, count: int) -> list[Block]:
        """`count` blocks from the head of the free list, each with a reference count of 1."""
        assert count <= self.num_free, "callers check num_free first: a failed take touches nothing"
        taken = []
        for _ in range(count):
            block = self._ends.next
            self._unlink(block)
            if block.key is not None:
                self._on_evict(block)
            block.ref_count = 1
            taken.append(block)
        return taken

    def touch(self, block: Block) -> None:
        """Hold a block that someone else holds, or that is free with its content still there."""
        if block.ref_count == 0:
            self._unlink(block)
        block.ref_count += 1

    def release(self, blocks: Iterable[Block]) -> None:
        """Drop one reference to each block.

        Pass a request's blocks last first: its tail is then evicted before its prefix, which other
        requests are likelier to share.
        """
        for block in blocks:
            assert block.ref_count > 0, f"{block} is released more often than held"
            block.ref_count -= 1
            if block.ref_count == 0:
                # Tail: evicted last. Head: taken next, while its memory is still warm.
                self._insert_before(self._ends if block.key else self._ends.next, block)

    def free_ids(self) -> list[int]:
        """Ids of the free blocks, next to be taken first."""
        ids = []
        block = self._ends.next
        while block is not self._ends:
            ids.append(block.block_id)
            block = block.next
        return ids

    def _insert_before(self, successor: Block, block: Block) -> None:
        block.prev, block.next = successor.prev, successor
        successor.prev.next = block
        successor.prev = block
        self.num_free += 1

    def _unlink(self, block: Block) -> None:
        block.prev.next = block.next
        block.next.prev = block.prev
        self.num_free -= 1
