"""Sampled tokens in columns: whose they are, how many each has, and their log probabilities.

Read side by side: the first owner has as many of the tokens as the first count says, the second the
next ones, and so on. With one token each there are no counts, and where nobody asks for log
probabilities there are none: nothing here then costs more than the two columns themselves.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from nanocore.engine_core.scheduling.logprob_columns import LogprobColumns
from nanocore.engine_core.scheduling.spans import IntArray, spans


@dataclass(slots=True)
class TokenColumns:
    """Tokens by owner: a row, or the handle of a request.

    owners: integers [n], no one twice. token_ids: int32 [tokens], owner by owner. counts: int [n],
    each at least 1; None if all are 1, also where they are given. logprobs: an entry for each token
    of those owners that ask for them; None if none does.
    """

    owners: IntArray
    token_ids: NDArray[np.int32]
    counts: IntArray | None = None
    logprobs: LogprobColumns | None = None

    def __post_init__(self) -> None:
        if self.counts is not None and (self.counts == 1).all():
            self.counts = None

    def take(self, chosen: IntArray | NDArray[np.bool_]) -> TokenColumns:
        """Some owners' tokens: by their indices, in that order, or by a mask."""
        owners, logprobs = self.owners[chosen], self.logprobs
        if logprobs is not None:
            logprobs = logprobs.of(owners)
        if self.counts is None:
            return TokenColumns(owners, self.token_ids[chosen], None, logprobs)
        counts = self.counts[chosen]
        starts = (np.cumsum(self.counts) - self.counts)[chosen]
        return TokenColumns(owners, self.token_ids[spans(starts, counts)], counts, logprobs)

    def shortened(self, num_kept: dict[int, int]) -> TokenColumns:
        """Without what some owners, by index, have beyond their first so many tokens."""
        counts = np.ones(len(self.owners), np.int64) if self.counts is None else self.counts
        starts = np.cumsum(counts) - counts
        counts = counts.copy()
        counts[list(num_kept)] = list(num_kept.values())
        left = counts > 0
        tokens = spans(starts[left], counts[left])
        logprobs = self.logprobs
        if logprobs is not None:
            by_owner = {int(self.owners[index]): num for index, num in num_kept.items()}
            logprobs = logprobs.shortened(by_owner)
        counts_left = None if self.counts is None else counts[left]
        return TokenColumns(self.owners[left], self.token_ids[tokens], counts_left, logprobs)

    def renamed(self, names: IntArray) -> TokenColumns:
        """The same of other owners. names: of each owner, by its number."""
        logprobs = None if self.logprobs is None else self.logprobs.renamed(names)
        return TokenColumns(names[self.owners], self.token_ids, self.counts, logprobs)

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
