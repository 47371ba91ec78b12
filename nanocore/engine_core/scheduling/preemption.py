"""When blocks run out: whom a running set preempts, and whether who did not fit may fit by now."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from nanocore.engine_core.scheduling.precedence import PrecedenceKey
from nanocore.engine_core.scheduling.request import Request
from nanocore.engine_core.scheduling.row_table import RowTable
from nanocore.kv_cache import Block, BlockKey, KVCacheManager


def next_preempted(table: RowTable, precedence: PrecedenceKey) -> Request:
    """The last by precedence, but for those that are about to end; of equals the cheapest one.

    It costs the tokens it computed itself: what it found in the prefix cache it is likely to find
    again. The one that would cost most stays, so there is always progress.
    """

    def order(request: Request) -> tuple[float, int, int, int]:
        first, arrival, handle = precedence(request)
        num_computed, num_cached = table.num_computed[request.row], table.num_cached[request.row]
        return first, arrival, int(num_cached - num_computed), handle

    return max((one for one in table.running() if one.row not in table.finishing), key=order)


class TooFewBlocks(NamedTuple):
    """How it was when a request did not fit.

    num_gains: of the block pool. missing: key of the first block of its prefix that was not found.
    """

    handle: int
    num_free_blocks: int
    num_gains: int
    missing: BlockKey | None

    @classmethod
    def of(cls, kv_cache: KVCacheManager, request: Request, hits: Sequence[Block]) -> TooFewBlocks:
        """Note how it is now. hits: the blocks of its prefix that were found."""
        keys = request.prefix_keys(kv_cache.block_size)
        missing = keys[len(hits)] if len(hits) < len(keys) else None
        return cls(request.handle, kv_cache.num_free_blocks, kv_cache.pool.num_gains, missing)

    def lasts(self, kv_cache: KVCacheManager, request: Request) -> bool:
        """Whether nothing was freed since, and no more of the prefix can be found."""
        return (
            request.handle == self.handle
            and kv_cache.pool.num_gains == self.num_gains
            and not (self.missing and kv_cache.is_findable(self.missing))
        )


NOT_SHORT: Final = TooFewBlocks(-1, -1, -1, None)
"""Stands where no request has failed to fit: no request has this handle."""
