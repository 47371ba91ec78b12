"""Block keys: a chain of digests that identifies a full block by its tokens and all before them.

A block's digest is computed over its parent's digest and its own content, so equal digests mean
equal prefixes, apart from collisions. The digest (xxh3-128) is not cryptographic: it tells where to
look, and `PrefixIndex` confirms each hit.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from functools import cache

import xxhash

TOKEN_BYTES = 4

DigestFunction = Callable[[bytes], bytes]

BlockKey = tuple[bytes, bytes]
"""(digest, content) of a full block.

digest: 16 bytes, over the parent's digest and the content. content: the block's token ids as int32
bytes; in a prompt's first block the tagged extra keys precede them. A plain tuple, because a long
prompt has thousands of them.
"""


class KeyChain:
    """The block keys of one request; grows as its tokens become known.

    Args:
        block_size: tokens per block.
        extra_keys: requests share blocks only if these are equal, such as
            {"cache_salt": "tenant-7"}; None values are left out.
        digest: 16-byte hash of bytes; tests replace it by one that collides.

    extra: the extra keys as bytes; equal ones allow sharing.
    """

    __slots__ = ("_blocks", "_digest", "_num_bytes", "extra", "keys")

    def __init__(
        self,
        block_size: int,
        extra_keys: Mapping[str, str | None] | None = None,
        digest: DigestFunction = xxhash.xxh3_128_digest,
    ) -> None:
        self.keys: list[BlockKey] = []
        self._num_bytes = block_size * TOKEN_BYTES
        self._blocks = _block_struct(self._num_bytes)
        self._digest = digest
        self.extra = _tagged(extra_keys) if extra_keys else b""

    def copy(self) -> KeyChain:
        """Return a copy, for a sibling sample whose outputs will differ."""
        other = KeyChain.__new__(KeyChain)
        for name in self.__slots__:
            setattr(other, name, getattr(self, name))
        other.keys = self.keys.copy()
        return other

    def extend(self, token_ids: bytes) -> None:
        """Append the keys of the full blocks in `token_ids`; a final partial block is ignored.

        token_ids: int32 column that continues behind the last key.
        """
        # Locals: this loop hashes every block of a prompt.
        size, digest, keys = self._num_bytes, self._digest, self.keys
        parent = keys[-1][0] if keys else b""
        start = 0
        # Extra keys go into the first block alone; all later digests depend on it.
        if not keys and self.extra and len(token_ids) >= size:
            content = self.extra + token_ids[:size]
            parent = digest(content)
            keys.append((parent, content))
            start = size
        whole = memoryview(token_ids)[start : len(token_ids) - len(token_ids) % size]
        for (content,) in self._blocks.iter_unpack(whole):
            parent = digest(parent + content)
            keys.append((parent, content))


@cache
def _block_struct(num_bytes: int) -> struct.Struct:
    """Return a struct that cuts a column into blocks: the fastest way to slice bytes evenly."""
    return struct.Struct(f"{num_bytes}s")


def _tagged(extra_keys: Mapping[str, str | None]) -> bytes:
    """Encode extra keys with names and lengths, so that no two different sets look equal."""
    parts = []
    for name, value in sorted(extra_keys.items()):
        if value is not None:
            data = value.encode()
            parts.append(b"%s:%d:%s" % (name.encode(), len(data), data))
    return b"".join(parts)
