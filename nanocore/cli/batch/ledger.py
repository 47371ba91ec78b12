"""Which lines of a batch have results already, and which custom_ids the input has had.

A database in a temporary file of its own, which SQLite removes: what it keeps in memory does not
grow with the batch.
"""

from __future__ import annotations

import sqlite3


class Ledger:
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
        """A custom_id has a result; False if it had one before."""
        done = self._rows.execute(
            "INSERT OR IGNORE INTO results VALUES (?, ?)", (custom_id, failed)
        )
        return done.rowcount == 1

    def add_bad_line(self, line: int) -> None:
        """A line of the input was found to be none."""
        self._rows.execute("INSERT OR IGNORE INTO bad_lines VALUES (?)", (line,))

    def result(self, custom_id: str) -> bool | None:
        """Whether its result is an error; None: it has no result."""
        row = self._rows.execute("SELECT failed FROM results WHERE custom_id = ?", (custom_id,))
        return bool(found[0]) if (found := row.fetchone()) else None

    def is_bad_line(self, line: int) -> bool:
        """Whether that was said of it."""
        row = self._rows.execute("SELECT 1 FROM bad_lines WHERE line = ?", (line,))
        return row.fetchone() is not None

    def first_line(self, custom_id: str, line: int) -> int:
        """The line that has this custom_id: this one, or the one that had it before."""
        self._rows.execute("INSERT OR IGNORE INTO seen VALUES (?, ?)", (custom_id, line))
        row = self._rows.execute("SELECT line FROM seen WHERE custom_id = ?", (custom_id,))
        found: int = row.fetchone()[0]
        return found

    def close(self) -> None:
        """Forget it all."""
        self._rows.close()
