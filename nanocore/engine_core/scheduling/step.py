"""One step as the scheduler remembers it, from its plan until its result is in.

Several may be in flight: a step is planned from counts alone, before the tokens of the previous one
are known.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from nanocore.engine_core.scheduling.request import Request
from nanocore.engine_core.scheduling.row_table import IntArray

_NO_ROWS: IntArray = np.zeros(0, np.int64)


class Chunk(NamedTuple):
    """Tokens that a step computes of one row. num_computed: its computed tokens before them."""

    row: int
    num_tokens: int
    num_computed: int


class Step:
    """What one step computes, and what happened when it was planned and when it ended.

    group: of rows, see `RowTable`; its rows alone take their next token or finish their prompt.
    decoding: rows that take one token; decode_ends: their computed tokens after the step. chunks:
    the other rows that take part. started: rows whose prompt it completes; they decode from the
    next step on. first, last: rows whose first or last token it samples (EOS and stop ids aside).
    stalled: rows that wait until an earlier step releases blocks. blocks: ids of the blocks given
    to running rows. dead_rows: those whose request ended or was preempted while the step was in
    flight, so that its result for them is void. new, resumed, preempted, finished: requests.
    cached: tokens found in the prefix cache, by request id. token_budget: in tokens. start_s,
    context: for the cost model, see `StepBudget`.
    """

    __slots__ = (
        "blocks", "cached", "chunks", "context", "dead_rows", "decode_ends", "decoding", "finished",
        "first", "group", "last", "new", "number", "preempted", "resumed", "stalled", "start_s",
        "started", "token_budget",
    )  # fmt: skip

    def __init__(self, number: int, token_budget: int, group: int = 0) -> None:
        self.number = number
        self.group = group
        self.token_budget = token_budget
        self.decoding = self.decode_ends = _NO_ROWS
        self.chunks: list[Chunk] = []
        self.first: list[int] = []
        self.last: list[int] = []
        self.started: list[int] = []
        self.stalled: set[int] = set()
        self.blocks: dict[int, list[int]] = {}
        self.dead_rows: set[int] = set()
        self.new: list[Request] = []
        self.resumed: list[Request] = []
        self.preempted: list[Request] = []
        self.finished: list[Request] = []
        self.cached: dict[str, int] = {}
        self.start_s = 0.0
        self.context = 0

    @property
    def num_tokens(self) -> int:
        """Tokens computed, over all rows."""
        return len(self.decoding) + sum([chunk.num_tokens for chunk in self.chunks])

    def scheduled(self) -> Iterator[Chunk]:
        """Every row that takes part, decoding ones first."""
        for row, end in zip(self.decoding.tolist(), self.decode_ends.tolist(), strict=True):
            yield Chunk(row, 1, end - 1)
        yield from self.chunks
