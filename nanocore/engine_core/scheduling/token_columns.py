"""Sampled tokens in columns: whose they are, how many each has, and what is said of each token.

Read side by side: the first owner has as many of the tokens as the first count says, the second the
next ones, and so on. With one token each there are no counts, and nothing here costs more than the
two columns themselves.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.integer]
NumberColumns = dict[str, NDArray[np.float32]]
"""By name, a number for each token."""


@dataclass(slots=True)
class TokenColumns:
    """Tokens by owner: a row, or the handle of a request.

    owners: integers [n], no one twice. token_ids: int32 [tokens], owner by owner. counts: int [n],
    each at least 1; None if all are 1, also where they are given. columns: float32 [tokens] each.
    """

    owners: IntArray
    token_ids: NDArray[np.int32]
    counts: IntArray | None = None
    columns: NumberColumns = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.counts is not None and (self.counts == 1).all():
            self.counts = None

    def take(self, chosen: IntArray | NDArray[np.bool_]) -> TokenColumns:
        """Some owners' tokens: by their indices, in that order, or by a mask."""
        if self.counts is None:
            return self._with(self.owners[chosen], chosen, None)
        counts = self.counts[chosen]
        starts = (np.cumsum(self.counts) - self.counts)[chosen]
        return self._with(self.owners[chosen], _spans(starts, counts), counts)

    def shortened(self, num_kept: dict[int, int]) -> TokenColumns:
        """Without what some owners, by index, have beyond their first so many tokens."""
        counts = np.ones(len(self.owners), np.int64) if self.counts is None else self.counts
        starts = np.cumsum(counts) - counts
        counts = counts.copy()
        counts[list(num_kept)] = list(num_kept.values())
        left = counts > 0
        tokens = _spans(starts[left], counts[left])
        return self._with(self.owners[left], tokens, None if self.counts is None else counts[left])

    def locate(self, tokens: list[int]) -> Iterator[tuple[int, int]]:
        """(index of the owner, which of its tokens, from 0) of each of these tokens."""
        if self.counts is None:
            return iter([(index, 0) for index in tokens])
        ends = np.cumsum(self.counts)
        indices = np.searchsorted(ends, tokens, side="right")
        places = tokens - (ends - self.counts)[indices]
        return zip(indices.tolist(), places.tolist(), strict=True)

    def owner_of_each(self) -> IntArray:
        """Whose each token is; integers [tokens]."""
        return self.owners if self.counts is None else np.repeat(self.owners, self.counts)

    def _with(
        self, owners: IntArray, tokens: IntArray | NDArray[np.bool_], counts: IntArray | None
    ) -> TokenColumns:
        columns = {name: column[tokens] for name, column in self.columns.items()}
        return TokenColumns(owners, self.token_ids[tokens], counts, columns)


def places_in_rows(counts: IntArray) -> IntArray:
    """0, 1, ... for each row's tokens; int [tokens]."""
    return np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)


def _spans(starts: IntArray, counts: IntArray) -> IntArray:
    """Indices of tokens, by where an owner's begin and how many there are."""
    return np.repeat(starts, counts) + places_in_rows(counts)
