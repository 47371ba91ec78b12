"""PendingLines: lines of a batch's input that have no result yet, in order.

The index of results is a temporary SQLite database, so that memory does not grow with the batch.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator

from nanocore.cli.batch.lines import DUPLICATE_CODE, BadLine, BatchRequest


class ResultIndex:
    """Used by one thread at a time."""

    def __init__(self) -> None:
        self._rows = sqlite3.connect("", isolation_level=None, check_same_thread=False)
        self._rows.executescript(
            "PRAGMA journal_mode = OFF;"
            "CREATE TABLE results (custom_id TEXT PRIMARY KEY, failed INTEGER) WITHOUT ROWID;"
            "CREATE TABLE bad_lines (line INTEGER PRIMARY KEY);"
            "CREATE TABLE seen (custom_id TEXT PRIMARY KEY, line INTEGER) WITHOUT ROWID;"
            "BEGIN"
        )

    def add_result(self, custom_id: str, failed: bool) -> bool:
        """Note a result; return False if its custom_id has one already."""
        done = self._rows.execute(
            "INSERT OR IGNORE INTO results VALUES (?, ?)", (custom_id, failed)
        )
        return done.rowcount == 1

    def add_bad_line(self, line: int) -> None:
        self._rows.execute("INSERT OR IGNORE INTO bad_lines VALUES (?)", (line,))

    def result(self, custom_id: str) -> bool | None:
        """Return whether the result is an error; None if there is no result."""
        row = self._rows.execute("SELECT failed FROM results WHERE custom_id = ?", (custom_id,))
        return bool(found[0]) if (found := row.fetchone()) else None

    def is_bad_line(self, line: int) -> bool:
        row = self._rows.execute("SELECT 1 FROM bad_lines WHERE line = ?", (line,))
        return row.fetchone() is not None

    def first_line(self, custom_id: str, line: int) -> int:
        """Return the first line with this custom_id: this one, or an earlier one."""
        self._rows.execute("INSERT OR IGNORE INTO seen VALUES (?, ?)", (custom_id, line))
        row = self._rows.execute("SELECT line FROM seen WHERE custom_id = ?", (custom_id,))
        found: int = row.fetchone()[0]
        return found

    def close(self) -> None:
        self._rows.close()


class PendingLines:
    """num_done: lines skipped because they have results. num_failed: of those, errors. Used by one
    thread at a time."""

    def __init__(self, lines: Iterator[BatchRequest | BadLine], index: ResultIndex) -> None:
        self.num_done = 0
        self.num_failed = 0
        self._held: BatchRequest | BadLine | None = None
        self._lines = lines
        self._index = index

    def has_more(self) -> bool:
        self._held = self.next()
        return self._held is not None

    def next(self) -> BatchRequest | BadLine | None:
        """Return the next line without a result, or None."""
        held, self._held = self._held, None
        return held or self._find()

    def _find(self) -> BatchRequest | BadLine | None:
        for line in self._lines:
            line = self._unless_duplicate(line)
            failed = self._result(line)
            if failed is None:
                return line
            self.num_done += 1
            self.num_failed += failed
        return None

    def _unless_duplicate(self, line: BatchRequest | BadLine) -> BatchRequest | BadLine:
        if line.custom_id is None:
            return line
        first = self._index.first_line(line.custom_id, line.line)
        if first == line.line:
            return line
        text = f"line {first} has the same custom_id"
        return BadLine(line.line, line.custom_id, DUPLICATE_CODE, text)

    def _result(self, line: BatchRequest | BadLine) -> bool | None:
        """See `ResultIndex.result`."""
        if (isinstance(line, BadLine) and line.code == DUPLICATE_CODE) or line.custom_id is None:
            return True if self._index.is_bad_line(line.line) else None
        return self._index.result(line.custom_id)
