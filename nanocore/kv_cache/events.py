"""KV cache events: what a prefix-aware router needs to know which prefixes an engine holds.

Set semantics by block hash: a hash is stored once, when its first copy appears, and removed once,
when its last copy goes, so replaying the batches in order gives exactly the findable blocks.
Batches are numbered from 0 without gaps; a subscriber that sees a gap has missed something.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple


class BlockStored(NamedTuple):
    """Consecutive full blocks of one prefix have become findable.

    block_hashes: 16 bytes each (xxh3-128 over the parent's hash and the content).
    parent_block_hash: of the block before the first of these; None at the start of a prompt.
    token_ids: int32 column of all tokens of these blocks. extra_keys: the tagged extra keys of the
    prompt (cache_salt and the like) if the first of these blocks starts it, else empty; they are
    part of the hashes.
    """

    block_hashes: list[bytes]
    parent_block_hash: bytes | None
    token_ids: bytes
    block_size: int
    extra_keys: bytes = b""


class BlockRemoved(NamedTuple):
    """No copy of these blocks can be found any more."""

    block_hashes: list[bytes]


class AllBlocksCleared(NamedTuple):
    """The prefix cache was reset."""


KVEvent = BlockStored | BlockRemoved | AllBlocksCleared


class KVEventBatch(NamedTuple):
    """The events of one step, in order. sequence: 0, 1, 2, …"""

    sequence: int
    events: list[KVEvent]


KVEventSubscriber = Callable[[KVEventBatch], None]
"""Called on the step loop's thread, at most once per step; must return at once."""
