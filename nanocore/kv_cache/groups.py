"""What requests hold beside the blocks of the primary group: one interface, whatever is kept.

The primary group has a block for all tokens of a request, and its blocks are the nodes of the
prefix index. Each other group decides by itself which blocks it keeps, and at which boundaries of a
prefix it could go on. A hit ends at the last boundary that all of them can serve.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Protocol

from nanocore.kv_cache.block_key import BlockKey
from nanocore.kv_cache.block_pool import Block
from nanocore.kv_cache.capacity import CacheGroup, Capacity
from nanocore.kv_cache.events import GroupEvents
from nanocore.kv_cache.prefix_index import GroupIndex
from nanocore.kv_cache.slab_pool import Need, SlabArena, SlabPool
from nanocore.kv_cache.state_group import StateGroup
from nanocore.kv_cache.window_group import WindowGroup

Left = tuple[SlabPool, list[Block], bool]
"""Blocks of a pool that a request has left, and whether nobody is likely to need them again."""


class Group(Protocol):
    """Blocks of one group beside the primary. Positions in a request are counted in blocks."""

    group: CacheGroup
    pool: SlabPool
    index: GroupIndex

    def begin_step(self) -> None:
        """A further step is being planned."""

    def blocks(self, handle: int) -> Sequence[Block]:
        """Return the blocks that a request holds, in the order of its tokens."""

    def last_boundary(self, keys: Sequence[BlockKey], end: int, soon: bool = False) -> int:
        """Return the last boundary up to `end` that can be served. keys: of the prefix.

        soon: when the step that is being planned is over.
        """

    def seen(self, keys: Sequence[BlockKey], boundary: int) -> list[Block]:
        """Return the blocks that a request needs to go on at a boundary that can be served."""

    def num_needed(self, handle: int, num_blocks: int, boundary: int, num_hits: int) -> int:
        """Return how many blocks more a request takes for its first num_blocks.

        boundary, num_hits: of its cached prefix, and what it needs there, if it holds none yet.
        """

    def admit(
        self, handle: int, boundary: int, hits: Sequence[Block], boundaries: Collection[int]
    ) -> None:
        """Let a request hold what it needs to go on at the end of its cached prefix.

        boundaries: of its prompt, where others are likely to go on.
        """

    def allocate(self, handle: int, num_blocks: int, start: int) -> list[int]:
        """Let a request hold blocks up to its first num_blocks.

        Returns the ids of blocks from number `start` on; of those that it does not hold 0, or
        `NO_STATE`.
        """

    def register(
        self, handle: int, start: int, parent: BlockKey | None, keys: Sequence[BlockKey]
    ) -> None:
        """Make blocks from number `start` on findable under these key objects.

        parent: key of the block before them.
        """

    def leave(self, handle: int, num_computed: int) -> list[list[Block]]:
        """Take the blocks from a request that its tokens from num_computed on do not need.

        Returns those that others are likely to need, and the rest; the caller releases them.
        """

    def pop(self, handle: int) -> list[Block]:
        """Take all blocks from a request, if it has any."""


class Groups:
    """All groups of a model beside the primary; there is one at least."""

    def __init__(
        self,
        groups: Sequence[tuple[CacheGroup, GroupEvents]],
        capacity: Capacity,
        arena: SlabArena,
    ) -> None:
        self._block_size = capacity.block_size
        self._groups: list[Group] = [
            (StateGroup if one.spacing else WindowGroup)(one, capacity, arena, events)
            for one, events in groups
        ]

    def __iter__(self) -> Iterator[Group]:
        return iter(self._groups)

    def begin_step(self) -> None:
        for one in self._groups:
            one.begin_step()

    def block_ids(self, handle: int, group: CacheGroup) -> list[int]:
        """Return the ids of a group's blocks that a request holds."""
        (own,) = [one for one in self._groups if one.group == group]
        return [block.block_id for block in own.blocks(handle)]

    def last_boundary(self, keys: Sequence[BlockKey], soon: bool = False) -> tuple[int, str]:
        """Return the last boundary that all can serve; and who lacks a later one.

        keys: of the blocks that the primary group has. soon: see `Group`.
        """
        boundary, lost_group, is_settled = len(keys), "", False
        # A group may lack what another one's earlier boundary needs.
        while not is_settled:
            before = boundary
            for one in self._groups:
                if (last := one.last_boundary(keys, boundary, soon)) < boundary:
                    boundary, lost_group = last, lost_group or one.group.name
            is_settled = boundary == before
        return boundary, lost_group

    def seen(self, keys: Sequence[BlockKey], boundary: int) -> list[list[Block]]:
        """Return, of each group, the blocks that a request needs to go on at a boundary."""
        return [one.seen(keys, boundary) for one in self._groups]

    def admit(
        self,
        handle: int,
        boundary: int,
        seen: Sequence[list[Block]],
        num_prompt_tokens: int,
        parted: int,
    ) -> None:
        """Let a request hold what it needs to go on at the end of its cached prefix.

        parted: blocks that its prompt has in common with others.
        """
        # Where others are likely to go on: here, where they have parted, and at the prompt's end,
        # with and without what a chat template puts before the answer.
        ends = num_prompt_tokens - 1, num_prompt_tokens - 1 - self._block_size // 2
        boundaries = {boundary, parted, *(max(end, 0) // self._block_size for end in ends)}
        for number, one in enumerate(self._groups):
            one.admit(handle, boundary, seen[number] if seen else (), boundaries)

    def needs(
        self,
        handle: int,
        num_blocks: int,
        boundary: int,
        seen: Sequence[list[Block]],
        released: Collection[int],
    ) -> Iterator[Need]:
        """Yield what a request needs for its first num_blocks; boundary, seen: of its prefix.

        released: requests whose blocks count as free.
        """
        for number, one in enumerate(self._groups):
            hits = seen[number] if seen else ()
            num_new = one.num_needed(handle, num_blocks, boundary, len(hits))
            num_soon = sum([len(one.blocks(other)) for other in released])
            yield Need(one.pool, num_new, hits, num_soon)

    def leave(self, handle: int, num_computed: int) -> Iterator[Left]:
        """Take the blocks from a request that its tokens from num_computed on do not need."""
        for one in self._groups:
            kept, others = one.leave(handle, num_computed)
            yield one.pool, kept, False
            yield one.pool, others, True
