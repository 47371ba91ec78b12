"""The step that each rank is at, in memory that the engine shares with its ranks.

A rank writes its own line without telling anybody, so it costs a step nothing; the engine reads the
board when a step takes too long, to name the rank that keeps the others waiting.
"""

from __future__ import annotations

import mmap
import os
from typing import Final

import numpy as np

_LINE_WORDS: Final = 8
"""Words of 64 bits in a cache line; each rank has one line."""


class StatusBoard:
    """num_ranks lines of (steps begun, steps done).

    Args:
        fd: from `create`, inherited by ranks.
    """

    def __init__(self, fd: int, num_ranks: int) -> None:
        memory = mmap.mmap(fd, num_ranks * _LINE_WORDS * 8)
        lines = np.frombuffer(memory, np.uint64).reshape(num_ranks, _LINE_WORDS)
        self._begun, self._done = lines[:, 0], lines[:, 1]

    @staticmethod
    def create(num_ranks: int) -> int:
        """The descriptor of a new board's memory, zeroed."""
        fd = os.memfd_create("nanocore-status-board", os.MFD_CLOEXEC)
        os.truncate(fd, num_ranks * _LINE_WORDS * 8)
        return fd

    def begin(self, rank: int, step: int) -> None:
        self._begun[rank] = step

    def finish(self, rank: int, step: int) -> None:
        self._done[rank] = step

    def behind(self, step: int) -> list[tuple[int, int]]:
        """(rank, the step it is in or last finished) of the ranks that have not done this step."""
        return [
            (rank, int(max(self._begun[rank], self._done[rank])))
            for rank in np.flatnonzero(self._done < step).tolist()
        ]
