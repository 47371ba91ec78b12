"""Tokens that wait for a slow client: appended step by step, merged by request when it reads.

Kept as flat columns in the order in which they came, so a token costs eight bytes, and four for
each number that is said of it, whatever the steps were like.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from nanocore.engine_core.scheduling.request import TOKEN_DTYPE
from nanocore.engine_core.scheduling.token_columns import TokenColumns

_NUMBER_DTYPE = np.dtype("<f4")


@dataclass(slots=True)
class TokenLog:
    """One client's tokens in columns, one entry a token.

    Numbers that a step does not say of its tokens are NaN.
    """

    _handles: bytearray = field(default_factory=bytearray)
    _token_ids: bytearray = field(default_factory=bytearray)
    _columns: dict[str, bytearray] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self._token_ids) // TOKEN_DTYPE.itemsize

    def add(self, tokens: TokenColumns) -> None:
        """Append a step's handles, counts and tokens, column by column."""
        num_before = len(self)
        self._handles += tokens.owner_of_each().astype(np.uint32, copy=False).tobytes()
        self._token_ids += tokens.token_ids.astype(TOKEN_DTYPE, copy=False).tobytes()
        for name in {**self._columns, **tokens.columns}:
            column = self._columns.setdefault(name, bytearray(_unsaid(num_before)))
            if name in tokens.columns:
                column += tokens.columns[name].astype(_NUMBER_DTYPE, copy=False).tobytes()
            else:
                column += _unsaid(len(tokens.token_ids))

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
        columns = {
            name: np.frombuffer(column, _NUMBER_DTYPE)[order]
            for name, column in self._columns.items()
        }
        token_ids = np.frombuffer(self._token_ids, TOKEN_DTYPE)[order]
        return TokenColumns(handles[by_arrival], token_ids, counts[by_arrival], columns)


def _unsaid(num_tokens: int) -> bytes:
    return np.full(num_tokens, np.nan, _NUMBER_DTYPE).tobytes()
