"""A model's place in a scheduler's loop: it answers every plan at once.

For measuring what an engine's own bookkeeping costs. Every request's output is the same tokens,
read in a circle.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from nanocore.worker.plan import ModelRunnerOutput, SchedulerOutput

TOKEN_DTYPE = np.dtype("<i4")


class NoModelExecutor:
    """Answers one token for each row whose known tokens are all computed; vectorised over rows.

    num_rows: rows that plans may name. token_ids: what it answers, by position.
    """

    def __init__(self, num_rows: int, token_ids: list[int]) -> None:
        self._token_ids = np.array(token_ids, TOKEN_DTYPE)
        self._active = np.zeros(num_rows, bool)
        self._num_tokens = np.zeros(num_rows, np.int64)
        self._num_computed = np.zeros(num_rows, np.int64)
        self._counts = np.zeros(num_rows, np.int64)

    def execute(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        """Apply the plan's differences and answer."""
        self._active[_column(plan.removed_rows)] = False
        for new in plan.added:
            self._active[new.row] = True
            self._num_tokens[new.row] = len(new.token_ids) // TOKEN_DTYPE.itemsize
            self._num_computed[new.row] = new.num_computed_tokens
        np.copyto(self._counts, self._active)
        self._counts[_column(plan.chunk_rows)] = _column(plan.chunk_counts)
        self._num_computed += self._counts
        sampled = (self._counts > 0) & (self._num_computed >= self._num_tokens)
        (rows,) = np.nonzero(sampled)
        token_ids = self._token_ids[self._num_tokens[rows] % len(self._token_ids)]
        self._num_tokens[rows] += 1
        return ModelRunnerOutput(
            rows=rows.astype(TOKEN_DTYPE).tobytes(), token_ids=token_ids.tobytes()
        )


def _column(column: bytes) -> NDArray[np.int32]:
    return np.frombuffer(column, TOKEN_DTYPE)
