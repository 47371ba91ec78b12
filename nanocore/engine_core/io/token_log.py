"""Tokens that wait for a slow client: appended step by step, merged by request when it reads.

Kept as flat columns in the order in which they came, so a token costs eight bytes, whatever the
steps were like. Log probabilities name their owners, so they are merged as they are.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from nanocore.engine_core.requests.request import TOKEN_DTYPE
from nanocore.engine_core.scheduling.columns import LogprobColumns, TokenColumns


@dataclass(slots=True)
class TokenLog:
    """One client's tokens in columns, one entry a token."""

    _handles: bytearray = field(default_factory=bytearray)
    _token_ids: bytearray = field(default_factory=bytearray)
    _logprobs: list[LogprobColumns] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self._token_ids) // TOKEN_DTYPE.itemsize

    def add(self, tokens: TokenColumns) -> None:
        """Append a step's handles, counts and tokens, column by column."""
        self._handles += tokens.owner_of_each().astype(np.uint32, copy=False).tobytes()
        self._token_ids += tokens.token_ids.astype(TOKEN_DTYPE, copy=False).tobytes()
        if tokens.logprobs is not None:
            self._logprobs.append(tokens.logprobs)

    def merged(self) -> TokenColumns:
        """All of them by request, each request's in their order; who came first goes first."""
        handles, first, owners, counts = np.unique(
            np.frombuffer(self._handles, np.uint32),
            return_index=True,
            return_inverse=True,
            return_counts=True,
        )
        by_arrival = np.argsort(first)
        order = np.argsort(np.argsort(by_arrival)[owners], kind="stable")
        token_ids = np.frombuffer(self._token_ids, TOKEN_DTYPE)[order]
        logprobs = LogprobColumns.joined(self._logprobs) if self._logprobs else None
        return TokenColumns(handles[by_arrival], token_ids, counts[by_arrival], logprobs)
