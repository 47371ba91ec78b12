"""The prefix index: from the content of a full block, and of all before it, to the block.

A block's digest chains its parent's digest with its own content, so equal digests mean equal
prefixes, collisions aside. The digest (xxh3-128) is only the index: it is not cryptographic, so
every hit is confirmed by comparing the content and the parent. By induction over the chain a
collision can cost a hit but never serve another prompt's KV.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import NamedTuple

import xxhash

from nanocore.kv_cache.block_pool import Block

ROOT_ID = 0
"""The content id of the empty prefix, the parent of every first block."""

TOKEN_BYTES = 4

DigestFunction = Callable[[bytes], bytes]


class BlockKey(NamedTuple):
    """What identifies a full block, given its parent.

    digest: 16 bytes, over the parent's digest and the content.
    content: the block's token ids as int32 bytes; the first block's is preceded by the request's
    tagged extra keys.
    """

    digest: bytes
    content: bytes


class KeyChain:
    """The block keys of one request, growing as its tokens become known.

    Args:
        block_size: tokens per block.
        cache_salt: requests share blocks only with requests of the same salt.
        digest: 16-byte hash of bytes; replaceable so that tests can make it collide.
    """

    def __init__(
        self,
        block_size: int,
        cache_salt: str | None = None,
        digest: DigestFunction = xxhash.xxh3_128_digest,
    ) -> None:
        self.keys: list[BlockKey] = []
        self._block_size = block_size
        self._digest = digest
        self._extra = _tagged("cache_salt", cache_salt)

    @property
    def num_tokens(self) -> int:
        """Tokens covered by the keys: where the next `extend` continues."""
        return len(self.keys) * self._block_size

    def extend(self, token_ids: bytes) -> None:
        """Append the keys of the full blocks in `token_ids`, an int32 column.

        The column continues at token number `num_tokens`; a final partial block is left out.
        """
        size = self._block_size * TOKEN_BYTES
        parent = self.keys[-1].digest if self.keys else b""
        extra = b"" if self.keys else self._extra
        for start in range(0, len(token_ids) - size + 1, size):
            content = extra + token_ids[start : start + size]
            parent = self._digest(parent + content)
            self.keys.append(BlockKey(parent, content))
            extra = b""


class PrefixIndex:
    """Finds the block that holds a content after a given parent.

    Each distinct (parent, content) has a content id, never reused; blocks with equal content share
    it. Duplicate blocks are kept, because the ids in running block tables must not change.
    """

    def __init__(self) -> None:
        self._blocks: dict[bytes, list[Block]] = {}
        self._next_content_id = itertools.count(ROOT_ID + 1)

    def __len__(self) -> int:
        return sum(map(len, self._blocks.values()))

    def find(self, parent_id: int, key: BlockKey) -> Block | None:
        """A block confirmed to hold this content after this parent, or None."""
        for block in self._blocks.get(key.digest, ()):
            if block.parent_id == parent_id and block.key is not None:
                if block.key.content == key.content:
                    return block
        return None

    def insert(self, block: Block, parent_id: int, key: BlockKey) -> None:
        """Record what a block holds (or will hold at the end of the step being planned)."""
        assert block.key is None, "a block is registered once per life"
        same = self.find(parent_id, key)
        block.key = key
        block.parent_id = parent_id
        block.content_id = same.content_id if same else next(self._next_content_id)
        self._blocks.setdefault(key.digest, []).append(block)

    def remove(self, block: Block) -> None:
        """Forget a block, because its memory is about to be used for something else."""
        assert block.key is not None
        blocks = self._blocks[block.key.digest]
        blocks.remove(block)
        if not blocks:
            del self._blocks[block.key.digest]
        block.key = None


def _tagged(name: str, value: str | None) -> bytes:
    """An extra key with its name and length, so that no two kinds or values can be confused."""
    if value is None:
        return b""
    data = value.encode()
    return b"%s:%d:%s" % (name.encode(), len(data), data)
