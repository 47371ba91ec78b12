"""Proposer: what guesses the next tokens of rows, for the worker to verify.

A guess decides how many tokens a row may get in a step, never which ones: see `scheduling`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from ctypes import c_void_p
from functools import partial
from typing import Any, Final, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.integer]
NUM_EVIDENCE: Final = 65
FORCED: Final = 64
"""Evidence of a token that a grammar forces; no proposer says so."""


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


class RowFollower(Protocol):
    """Follows which requests own rows."""

    def begin(self, row: int, salt: Hashable) -> None:
        """Follow a request that takes a row. Only requests with its salt may share its output."""
        ...

    def end(self, row: int, num_prompt: int, num_tokens: int, has_finished: bool) -> None:
        """Forget a row, of which the tokens are still in the table; preempted: not finished."""
        ...


class Proposer(RowFollower, Protocol):
    """Guesses what follows the known tokens of rows, which it reads in the scheduler's table."""

    def propose(self, rows: IntArray, num_tokens: IntArray, most: IntArray) -> Proposals:
        """Guess up to most[i] tokens behind the first num_tokens[i] of each row.

        Rows are distinct, and num_tokens never shrinks between `begin` and `end`.
        """
        ...


class NativeLibrary(Protocol):
    """Compiled functions: `kernels.cpu.library.Library`."""

    functions: dict[str, Callable[..., Any]]


class NativeProposer:
    """Implements `Proposer` by a compiled one, with arrays that are made once: a call takes few
    microseconds.

    Args:
        propose: compiled function; it takes `arguments`, max_drafts, three columns, the three
            arrays of `Proposals` and the number of rows.
        token_ids: the scheduler's table, int32 [rows, tokens].

    Raises:
        ValueError: the table is not int32 or not contiguous.
    """

    def __init__(
        self,
        propose: Callable[..., Any],
        arguments: tuple[Any, ...],
        token_ids: NDArray[np.int32],
        max_drafts: int,
    ) -> None:
        if token_ids.dtype != np.int32 or not token_ids.flags.c_contiguous:
            raise ValueError(f"the table of tokens is {token_ids.dtype}; give a contiguous int32")
        num_rows = len(token_ids)
        self._columns = np.zeros((3, num_rows), np.int64)
        self._results = Proposals(
            np.zeros(num_rows, np.int64),
            np.zeros((num_rows, max_drafts), np.int32),
            np.zeros((num_rows, max_drafts), np.uint8),
        )
        pointers = [array.ctypes.data for array in (*self._columns, *self._results)]
        self._propose = partial(propose, *arguments, max_drafts, *map(c_void_p, pointers))
        self._table = token_ids  # it lives as long as its address is used

    def begin(self, row: int, salt: Hashable) -> None:
        """Follow a request that takes a row; one whose tokens say it all needs no more."""

    def end(self, row: int, num_prompt: int, num_tokens: int, has_finished: bool) -> None:
        """Forget a row."""

    def propose(self, rows: IntArray, num_tokens: IntArray, most: IntArray) -> Proposals:
        """Guess up to most[i] tokens behind the first num_tokens[i] of each row."""
        n = len(rows)
        columns = self._columns
        columns[0, :n], columns[1, :n], columns[2, :n] = rows, num_tokens, most
        self._propose(n)
        counts, token_ids, evidence = self._results
        return Proposals(counts[:n], token_ids[:n], evidence[:n])
