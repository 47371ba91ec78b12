"""What is left to do of a batch: the lines of its input that have no results yet, in order."""

from __future__ import annotations

from collections.abc import Iterator

from nanocore.cli.batch.ledger import Ledger
from nanocore.cli.batch.lines import BadLine, BatchRequest
from nanocore.cli.batch.result_lines import DUPLICATE_CODE


class Plan:
    """Used by one thread at a time. num_done: lines passed over, for they have results;
    num_failed: of these, errors."""

    def __init__(self, lines: Iterator[BatchRequest | BadLine], ledger: Ledger) -> None:
        self.num_done = 0
        self.num_failed = 0
        self._held: BatchRequest | BadLine | None = None
        self._lines = lines
        self._ledger = ledger

    def has_more(self) -> bool:
        """Whether there is a line to do."""
        self._held = self.next()
        return self._held is not None

    def next(self) -> BatchRequest | BadLine | None:
        """The next line to do; None: there is no more."""
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
        first = self._ledger.first_line(line.custom_id, line.line)
        if first == line.line:
            return line
        text = f"line {first} has this custom_id already, and one of them is asked"
        return BadLine(line.line, line.custom_id, DUPLICATE_CODE, text)

    def _result(self, line: BatchRequest | BadLine) -> bool | None:
        """Whether its result is an error; None: it has none."""
        if (isinstance(line, BadLine) and line.code == DUPLICATE_CODE) or line.custom_id is None:
            return True if self._ledger.is_bad_line(line.line) else None
        return self._ledger.result(line.custom_id)
