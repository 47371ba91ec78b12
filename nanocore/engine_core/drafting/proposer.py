"""Proposer: what guesses the next tokens of rows, for the worker to verify.

A guess decides how many tokens a row may get in a step, never which ones: see `scheduling`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, Final, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]
NUM_EVIDENCE: Final = 64


class Proposals(NamedTuple):
    """Drafts of n rows, at most k each; the arrays belong to the proposer until its next call.

    counts: Drafts of each row, [n] int64.
    token_ids: The drafts, [n, k] int32.
    evidence: Class of what speaks for each draft, below NUM_EVIDENCE, [n, k] uint8. Drafts of a
        class are accepted at a similar rate, which is to be learned.
    """

    counts: IntArray
    token_ids: NDArray[np.int32]
    evidence: NDArray[np.uint8]


class Proposer(Protocol):
    """Guesses what follows the known tokens of rows, which it reads in the scheduler's table."""

    def begin(self, row: int, salt: Hashable) -> None:
        """Follow a request that takes a row. Only requests with its salt may share its output."""
        ...

    def end(self, row: int, num_prompt: int, num_tokens: int, has_finished: bool) -> None:
        """Forget a row, of which the tokens are still in the table; preempted: not finished."""
        ...

    def propose(self, rows: IntArray, num_tokens: IntArray, most: IntArray) -> Proposals:
        """Guess up to most[i] tokens behind the first num_tokens[i] of each row.

        Rows are distinct, and num_tokens never shrinks between `begin` and `end`.
        """
        ...

    @property
    def num_bytes(self) -> int:
        """Memory that is held now."""
        ...


class NativeLibrary(Protocol):
    """Compiled functions: `kernels.cpu.library.Library`."""

    functions: dict[str, Callable[..., Any]]


class DraftArrays:
    """Arguments and results of native proposers, which are reused while they are large enough.

    Raises ValueError: the table is not int32 or not contiguous.
    """

    def __init__(self, token_ids: NDArray[np.int32], max_drafts: int) -> None:
        if token_ids.dtype != np.int32 or not token_ids.flags.c_contiguous:
            raise ValueError(f"the table of tokens is {token_ids.dtype}; give a contiguous int32")
        self.table = token_ids
        self.max_drafts = max_drafts
        num_rows = len(token_ids)
        self._results = Proposals(
            np.zeros(num_rows, np.int64),
            np.zeros((num_rows, max_drafts), np.int32),
            np.zeros((num_rows, max_drafts), np.uint8),
        )
        self._pointers = [array.ctypes.data for array in self._results]

    def propose(
        self, function: Callable[..., Any], *arguments: Any, columns: tuple[IntArray, ...]
    ) -> Proposals:
        """Call a native proposer with its own arguments, and with these columns of n rows."""
        columns = tuple(np.ascontiguousarray(column, np.int64) for column in columns)
        n = len(columns[0])
        pointers = [column.ctypes.data for column in columns]
        function(*arguments, n, self.max_drafts, *pointers, *self._pointers)
        counts, token_ids, evidence = self._results
        return Proposals(counts[:n], token_ids[:n], evidence[:n])
