"""Log probabilities in columns: whose token it is, its rank, and its candidates.

Every entry, one per token, names its owner (a row, or the handle of a request), so entries of any
tokens lie side by side, and merging is appending. Those of one owner are in the order of its
tokens. They follow the tokens they belong to (`TokenColumns`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from nanocore.engine_core.scheduling.spans import IntArray, spans
from nanocore.worker.plan import RowLogprobs

_INT = np.dtype("<i4")
_FLOAT = np.dtype("<f4")


@dataclass(slots=True)
class LogprobColumns:
    """Entries by owner, and their candidates, entry by entry.

    owners: integers [entries]. ranks, counts: int [entries]. token_ids: int32 [candidates],
    logprobs: float32 [candidates], counts[i] of them for the i-th entry.
    """

    owners: IntArray
    ranks: IntArray
    counts: IntArray
    token_ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]

    @classmethod
    def of_rows(cls, said: RowLogprobs) -> LogprobColumns:
        """What a worker says, by row.

        Raises:
            ValueError: the columns do not fit together.
        """
        columns = cls(
            # As wide as an index, because they will be one.
            owners=np.frombuffer(said.rows, _INT).astype(np.int64),
            ranks=np.frombuffer(said.ranks, _INT),
            counts=np.frombuffer(said.counts, _INT),
            token_ids=np.frombuffer(said.token_ids, _INT),
            logprobs=np.frombuffer(said.logprobs, _FLOAT),
        )
        num_entries, num_candidates = len(columns.owners), int(columns.counts.sum())
        fits = len(columns.ranks) == len(columns.counts) == num_entries
        fits = fits and len(columns.token_ids) == len(columns.logprobs) == num_candidates
        if not fits or (columns.counts < 1).any():
            lengths = {field.name: len(getattr(columns, field.name)) for field in fields(cls)}
            raise ValueError(
                f"a step's log probabilities do not fit together: columns of {lengths}, counts of "
                f"{num_candidates} in all"
            )
        return columns

    @classmethod
    def joined(cls, parts: Iterable[LogprobColumns]) -> LogprobColumns:
        """All of these, one after the other; there must be one."""
        parts = list(parts)
        if len(parts) == 1:
            return parts[0]
        names = [field.name for field in fields(cls)]
        return cls(*[np.concatenate([getattr(part, name) for part in parts]) for name in names])

    def __len__(self) -> int:
        return len(self.owners)

    @property
    def num_bytes(self) -> int:
        """As they travel."""
        return 12 * len(self.owners) + 8 * len(self.token_ids)

    @property
    def bytes_of_each(self) -> IntArray:
        """Of each entry, as it travels."""
        return 12 + 8 * self.counts.astype(np.int64)

    def take(self, chosen: IntArray | NDArray[np.bool_]) -> LogprobColumns:
        """Some entries: by their indices, in that order, or by a mask."""
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
        """The entries of these owners; None if there is none."""
        mask = np.isin(self.owners, owners)
        if mask.all():
            return self
        return self.take(mask) if mask.any() else None

    def shortened(self, num_kept: dict[int, int]) -> LogprobColumns | None:
        """Without what some owners have beyond their first so many tokens."""
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
        """The same of other owners. names: of each owner, by its number."""
        return LogprobColumns(
            names[self.owners], self.ranks, self.counts, self.token_ids, self.logprobs
        )
