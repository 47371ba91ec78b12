"""Tokens and log probabilities in columns, with the numpy index arithmetic that they need.

A step's tokens are read side by side: the first owner has the first counts[0] tokens, the second
the next counts[1], and so on. An owner is a row, or later the handle of a request. With one token
each there are no counts, and without requested logprobs there are none, so a plain decode step
costs two arrays. Logprob entries name their owner each, so entries of any tokens lie side by side,
and merging is concatenation; those of one owner are in the order of its tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from nanocore.worker.plan import RowLogprobs

IntArray = NDArray[np.integer]
Intervals = tuple[float, int] | NDArray[np.float64] | None
"""Times between a row's tokens: (seconds, number of rows that share it), or one per row."""


def places(counts: IntArray) -> IntArray:
    """Return 0, 1, ... within each owner's entries; int [entries]."""
    return np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)


def places_of(wanted: IntArray, owners: IntArray) -> IntArray:
    """Return the index of each of `wanted` in `owners`, which are distinct and in any order."""
    order = np.argsort(owners)
    return order[np.searchsorted(owners, wanted, sorter=order)]


def spans(starts: IntArray, counts: IntArray) -> IntArray:
    """Return the indices of each owner's entries: counts[i] of them from starts[i] on."""
    return np.repeat(starts, counts) + places(counts)


def attended_tokens(count: Any, end: Any) -> Any:
    """Return how many tokens the last `count` of a row's first `end` tokens attend to, in sum.

    Takes numbers or columns.
    """
    return count * (end - count) + count * (count + 1) // 2


_INT = np.dtype("<i4")
_FLOAT = np.dtype("<f4")


class LogprobColumns(msgspec.Struct):
    """Log probabilities of tokens: one entry per token, with its candidates.

    owners: integers [entries]. ranks, counts: int [entries]. token_ids: int32 [candidates],
    logprobs: float32 [candidates], counts[i] of them for the i-th entry.
    """

    owners: IntArray
    ranks: IntArray
    counts: IntArray
    token_ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]

    @classmethod
    def of_rows(cls, logprobs: RowLogprobs) -> LogprobColumns:
        """Read a worker's columns; owners are rows.

        Raises:
            ValueError: the columns do not fit together.
        """
        columns = cls(
            # As wide as an index, because they will be one.
            owners=np.frombuffer(logprobs.rows, _INT).astype(np.int64),
            ranks=np.frombuffer(logprobs.ranks, _INT),
            counts=np.frombuffer(logprobs.counts, _INT),
            token_ids=np.frombuffer(logprobs.token_ids, _INT),
            logprobs=np.frombuffer(logprobs.logprobs, _FLOAT),
        )
        num_entries, num_candidates = len(columns.owners), int(columns.counts.sum())
        fits = len(columns.ranks) == len(columns.counts) == num_entries
        fits = fits and len(columns.token_ids) == len(columns.logprobs) == num_candidates
        if not fits or (columns.counts < 1).any():
            lengths = {name: len(getattr(columns, name)) for name in cls.__struct_fields__}
            raise ValueError(
                f"the logprobs of a step do not fit together: columns of {lengths}, counts of "
                f"{num_candidates} in all"
            )
        return columns

    @classmethod
    def joined(cls, parts: Iterable[LogprobColumns]) -> LogprobColumns:
        """Concatenate one or more parts."""
        parts = list(parts)
        if len(parts) == 1:
            return parts[0]
        return cls(
            *[
                np.concatenate([getattr(part, name) for part in parts])
                for name in cls.__struct_fields__
            ]
        )

    def __len__(self) -> int:
        return len(self.owners)

    @property
    def num_bytes(self) -> int:
        """Size on the wire."""
        return 12 * len(self.owners) + 8 * len(self.token_ids)

    @property
    def bytes_of_each(self) -> IntArray:
        """Size of each entry on the wire."""
        return 12 + 8 * self.counts.astype(np.int64)

    def take(self, chosen: IntArray | NDArray[np.bool_]) -> LogprobColumns:
        """Select entries by indices, in that order, or by a mask."""
        counts = self.counts[chosen]
        candidates = spans((np.cumsum(self.counts) - self.counts)[chosen], counts)
        return LogprobColumns(
            self.owners[chosen],
            self.ranks[chosen],
            counts,
            self.token_ids[candidates],
            self.logprobs[candidates],
        )

    def of(self, owners: IntArray | list[int]) -> LogprobColumns | None:
        """Select the entries of these owners; None if there are none."""
        mask = np.isin(self.owners, owners)
        if mask.all():
            return self
        return self.take(mask) if mask.any() else None

    def shortened(self, num_kept: dict[int, int]) -> LogprobColumns | None:
        """Keep only the first num_kept[owner] entries of the owners named there."""
        # Stable: entries of one owner stay in the order of its tokens.
        order = np.argsort(self.owners, kind="stable")
        owners = self.owners[order]
        kept = np.ones(len(order), np.bool_)
        for owner, num in num_kept.items():
            start, end = np.searchsorted(owners, [owner, owner + 1])
            kept[order[start + num : end]] = False
        if kept.all():
            return self
        return self.take(kept) if kept.any() else None

    def renamed(self, names: IntArray) -> LogprobColumns:
        """Replace each owner by names[owner]."""
        return LogprobColumns(
            names[self.owners], self.ranks, self.counts, self.token_ids, self.logprobs
        )


class TokenColumns(msgspec.Struct):
    """Tokens by owner.

    Args:
        owners: integers [n], distinct: rows, or handles of requests.
        token_ids: int32 [tokens], owner by owner.
        counts: int [n], each at least 1; None, also where it is given, if all are 1.
        logprobs: an entry for each token whose owner requested logprobs; None if none did.
    """

    owners: IntArray
    token_ids: NDArray[np.int32]
    counts: IntArray | None = None
    logprobs: LogprobColumns | None = None

    def __post_init__(self) -> None:
        # Steps without drafts then take the cheap paths, whoever made the columns.
        if self.counts is not None and (self.counts == 1).all():
            self.counts = None

    def take(self, chosen: IntArray | NDArray[np.bool_]) -> TokenColumns:
        """Select owners by indices, in that order, or by a mask."""
        owners, logprobs = self.owners[chosen], self.logprobs
        if logprobs is not None:
            logprobs = logprobs.of(owners)
        if self.counts is None:
            return TokenColumns(owners, self.token_ids[chosen], None, logprobs)
        counts = self.counts[chosen]
        starts = (np.cumsum(self.counts) - self.counts)[chosen]
        return TokenColumns(owners, self.token_ids[spans(starts, counts)], counts, logprobs)

    def shortened(self, num_kept: dict[int, int]) -> TokenColumns:
        """Keep only the first num_kept[i] tokens of the owners with index i."""
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
        """Replace each owner by names[owner]: rows by handles."""
        logprobs = None if self.logprobs is None else self.logprobs.renamed(names)
        return TokenColumns(names[self.owners], self.token_ids, self.counts, logprobs)

    def locate(self, tokens: list[int]) -> Iterator[tuple[int, int]]:
        """Return (index of the owner, which of its tokens) for each of these token indices."""
        if self.counts is None:
            return iter([(index, 0) for index in tokens])
        ends = np.cumsum(self.counts)
        indices = np.searchsorted(ends, tokens, side="right")
        places = tokens - (ends - self.counts)[indices]
        return zip(indices.tolist(), places.tolist(), strict=True)

    def owner_of_each(self) -> IntArray:
        """Return the owner of each token; integers [tokens]."""
        return self.owners if self.counts is None else np.repeat(self.owners, self.counts)


class TokenTimes:
    """When each row got its last token. intervals: between these and the ones before, of a step.

    While consecutive steps have tokens for the same rows, one time stands for all of them, and a
    step costs one comparison. The column is written only when rows come or go.
    """

    def __init__(self, max_num_seqs: int) -> None:
        self.intervals: Intervals = None
        self._column = np.zeros(max_num_seqs)
        self._rows: IntArray | None = None  # the time of these rows is `_rows_s`, not the column's
        self._rows_s = 0.0

    def stamp(self, rows: IntArray, now_s: float) -> None:
        """Record new tokens. rows: must be the same array object as long as the rows are equal."""
        if rows is self._rows:
            self.intervals = now_s - self._rows_s, len(rows)
        elif len(rows):
            self._settle()
            before = self._column[rows]
            self.intervals = now_s - before[before > 0]
        else:
            self.intervals = None
            return
        self._rows, self._rows_s = rows, now_s

    def of(self, row: int) -> float:
        """Return when the row got its last token; 0 if it has none."""
        self._settle()
        return float(self._column[row])

    def set(self, row: int, last_token_s: float) -> None:
        """Start anew for another request in this row; 0 if it has no token yet."""
        self._settle()
        self._column[row] = last_token_s

    def _settle(self) -> None:
        if self._rows is not None:
            self._column[self._rows] = self._rows_s
            self._rows = None
