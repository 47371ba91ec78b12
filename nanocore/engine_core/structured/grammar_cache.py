"""What structured outputs came to, by digest: grammars and refusals, the longest unused forgotten.

Bounded in bytes, which a grammar estimates. Of a refusal the text is kept, and no exception, which
would hold what it passed on its way. One thread at a time uses it.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict

import msgspec

from nanocore.engine_core.structured.compilation import CompiledGrammar
from nanocore.protocol.errors import InvalidRequestError
from nanocore.protocol.structured_outputs import StructuredOutputs

_REFUSAL_BYTES = 2048
"""An entry with its digest and a text of a few lines."""


def digest(wanted: StructuredOutputs) -> bytes:
    """Of all that it says; nobody can find two with the same."""
    return hashlib.blake2b(msgspec.msgpack.encode(wanted), digest_size=32).digest()


class GrammarCache:
    """An LRU of at most max_bytes, or of one entry."""

    def __init__(self, max_bytes: int) -> None:
        self.num_bytes = 0
        self._max_bytes = max_bytes
        self._known: OrderedDict[bytes, CompiledGrammar | str] = OrderedDict()

    def __len__(self) -> int:
        return len(self._known)

    def find(self, key: bytes) -> CompiledGrammar | InvalidRequestError | None:
        """What is known of it, which is then the last to be forgotten."""
        found = self._known.get(key)
        if found is not None:
            self._known.move_to_end(key)
        return InvalidRequestError(found) if isinstance(found, str) else found

    def put(self, key: bytes, value: CompiledGrammar | InvalidRequestError) -> None:
        """Remember it, in the place of what was known, and forget others for it."""
        before = self._known.pop(key, None)
        if before is not None:
            self.num_bytes -= _num_bytes(before)
        kept = str(value) if isinstance(value, InvalidRequestError) else value
        self._known[key] = kept
        self.num_bytes += _num_bytes(kept)
        while self.num_bytes > self._max_bytes and len(self._known) > 1:
            _, forgotten = self._known.popitem(last=False)
            self.num_bytes -= _num_bytes(forgotten)


def _num_bytes(value: CompiledGrammar | str) -> int:
    return value.num_bytes if isinstance(value, CompiledGrammar) else _REFUSAL_BYTES
