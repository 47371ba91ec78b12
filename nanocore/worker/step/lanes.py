"""Lanes: what layers are told of each token of a step beside its hidden state, declared once.

A lane is a number that a row keeps for as long as its request runs: say, the slot of its adapter,
or the factor of its hidden states. From `LANES` follow the columns of the persistent batch, a
step's memory with its padding, and `StepContext.lanes`, which every layer is handed. A layer that
reads one needs nothing else. There are none yet, and a step without lanes does nothing for them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nanocore.worker.plan import NewRow
from nanocore.worker.sampling.columns import numpy_dtype


class Lane(msgspec.Struct, frozen=True):
    """A number per token. default: of padding. of: a new row's value, for all its tokens."""

    name: str
    dtype: torch.dtype
    default: float
    of: Callable[[NewRow], float]


LANES: Final[list[Lane]] = []


class RowLanes:
    """The lanes' numbers of all rows, on the host."""

    def __init__(self, num_rows: int) -> None:
        self._columns = {
            lane.name: np.full(num_rows, lane.default, numpy_dtype(lane.dtype)) for lane in LANES
        }

    def set_row(self, new: NewRow) -> None:
        for lane in LANES:
            self._columns[lane.name][new.row] = lane.of(new)

    def of_tokens(self, rows_T: NDArray[np.int64]) -> dict[str, NDArray]:
        """Columns of a step whose tokens are of these rows, [T] by name."""
        return {name: column[rows_T] for name, column in self._columns.items()}


def lane_memory(max_tokens: int) -> dict[str, Tensor]:
    """Memory for the lanes of steps of up to so many tokens, on the host."""
    return {lane.name: torch.full((max_tokens,), lane.default, dtype=lane.dtype) for lane in LANES}
