"""When each row had its last token, which the times between tokens follow from."""

from __future__ import annotations

import numpy as np

from nanocore.engine_core.scheduling.journal import Journal
from nanocore.engine_core.scheduling.spans import IntArray


class TokenTimes:
    """When each row had its last token.

    As long as steps have tokens of the same rows, these have one time together: such a step costs a
    comparison. Only where rows come or go, columns are written.
    """

    def __init__(self, max_num_seqs: int, journal: Journal) -> None:
        self._journal = journal
        self._column = np.zeros(max_num_seqs)
        self._rows: IntArray | None = None  # their time is this, whatever the column says
        self._rows_s = 0.0

    def stamp(self, rows: IntArray, now_s: float) -> None:
        """These rows have tokens. rows: the same array as before, if they are the same rows."""
        if rows is self._rows:
            self._journal.intervals.append((now_s - self._rows_s, len(rows)))
        elif len(rows):
            self._settle()
            before = self._column[rows]
            self._journal.intervals.append(now_s - before[before > 0])
        else:
            return
        self._rows, self._rows_s = rows, now_s

    def of(self, row: int) -> float:
        """When the row had its last token; 0 if it had none."""
        self._settle()
        return float(self._column[row])

    def set(self, row: int, last_token_s: float) -> None:
        """The row is another request's, which had its last token then, or 0."""
        self._settle()
        self._column[row] = last_token_s

    def _settle(self) -> None:
        if self._rows is not None:
            self._column[self._rows] = self._rows_s
            self._rows = None
