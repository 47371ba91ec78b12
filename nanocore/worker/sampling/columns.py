"""What the sampler must know of each row: columns, each declared once.

From `COLUMNS` follow the table that the persistent batch keeps, the memory of a step's inputs on a
device with its padding, and the largest step that memory is sized by. A parameter that changes what
a row samples is a line here and, unless it is a filter, a processor in `processors`.

Shape suffixes: see `nanocore.kernels.interface`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nanocore.kernels.interface import Filters, Noise
from nanocore.kernels.step_rows import TokenPlaces
from nanocore.protocol.fields import MAX_INT32
from nanocore.protocol.sampling import EngineSamplingParams
from nanocore.worker.plan import NewRow

_MAX_FLOAT32: Final = float(np.finfo(np.float32).max)  # as good as any temperature above it


def _temperature(new: NewRow, vocab_size: int) -> float:
    return 0.0 if new.sampling.greedy else min(new.sampling.temperature, _MAX_FLOAT32)


def _top_k(new: NewRow, vocab_size: int) -> int:
    top_k = new.sampling.top_k
    return top_k if 0 < top_k < vocab_size else MAX_INT32


@dataclass(frozen=True, slots=True)
class Column:
    """A number that each row keeps for as long as its request runs.

    name: the sampling parameter's, if it comes from one. default: of rows that do not ask for it,
    and of padding.

    kind: a "row" column is what every row samples with. A value of another kind asks for more if it
    is not the default: a "filter" leaves fewer tokens to choose from (and means nothing to a greedy
    row), "logits" are changed by a processor, in greedy rows too.

    of: a new row's value, given the size of the vocabulary; without it the parameter of that name.
    costliest: the parameter's value with which sampling takes most memory, so that it is sized for
    it; None: the parameter's default.
    """

    name: str
    dtype: torch.dtype
    default: float
    kind: Literal["row", "filter", "logits"]
    of: Callable[[NewRow, int], float] | None = None
    costliest: Any = None

    def __post_init__(self) -> None:
        assert self.kind != "logits" or self.costliest is not None, "memory is sized for it"

    def value(self, new: NewRow, vocab_size: int) -> float:
        """What the column holds of a row that is added; the default of filters in greedy rows."""
        if self.kind == "filter" and new.sampling.greedy:
            return self.default
        return getattr(new.sampling, self.name) if self.of is None else self.of(new, vocab_size)


COLUMNS: Final = (
    Column("seed", torch.int64, 0, "row", lambda new, _: new.seed),
    Column("num_prompt_tokens", torch.int64, 0, "row", lambda new, _: new.num_prompt_tokens),
    Column("temperature", torch.float32, 0.0, "row", _temperature),
    Column("top_k", torch.int32, MAX_INT32, "filter", _top_k),
    Column("top_p", torch.float32, 1.0, "filter", costliest=0.999),
    Column("min_p", torch.float32, 0.0, "filter"),
)


def costliest_sampling() -> EngineSamplingParams:
    """That of a row which takes as much memory as any."""
    return EngineSamplingParams(
        **{column.name: column.costliest for column in COLUMNS if column.costliest is not None}
    )


class SampledRows:
    """The rows that a step samples, on the host; the same from step to step while the rows are.

    columns: [R] by name. plain: int64 indices of the R that take the best token, noise added;
    processed: of those that ask for more. asked: the columns of kind "logits" that one of these
    asks for. all_greedy: every row takes its most likely token.
    """

    def __init__(self, columns: dict[str, NDArray], is_processed: NDArray[np.bool_]) -> None:
        self.columns = columns
        self.processed, self.plain = is_processed.nonzero()[0], (~is_processed).nonzero()[0]
        self.asked: frozenset[str] = frozenset()
        if len(self.processed):
            self.asked = frozenset(
                column.name
                for column in COLUMNS
                if column.kind == "logits" and (columns[column.name] != column.default).any()
            )
        self.all_greedy = not columns["temperature"].any()

    @cached_property
    def tensors(self) -> dict[str, Tensor]:
        """The columns, in the same memory."""
        return {name: torch.from_numpy(values) for name, values in self.columns.items()}


class RowColumns:
    """The columns of all rows, on the host.

    Args:
        num_rows: of the persistent batch. vocab_size: tokens that there are.
    """

    def __init__(self, num_rows: int, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._columns = {
            column.name: np.full(num_rows, column.default, numpy_dtype(column.dtype))
            for column in COLUMNS
        }
        self._is_processed = np.zeros(num_rows, bool)

    def set_row(self, new: NewRow) -> None:
        """Take in how the request samples that takes this row, instead of its last owner."""
        values = {column.name: column.value(new, self._vocab_size) for column in COLUMNS}
        is_processed = any(
            column.kind != "row" and values[column.name] != column.default for column in COLUMNS
        )
        if is_processed and new.sampling.greedy:
            # Logits are changed and then filtered. One token is left, whatever the noise.
            values |= {"temperature": 1.0, "top_k": 1}
        for name, value in values.items():
            self._columns[name][new.row] = value
        self._is_processed[new.row] = is_processed

    def of_rows(self, rows: NDArray[np.int64]) -> SampledRows:
        """Copies of the columns of these rows, [R] in their order."""
        columns = {name: values[rows] for name, values in self._columns.items()}
        return SampledRows(columns, self._is_processed[rows])


@dataclass(frozen=True, slots=True)
class SamplingMetadata:
    """How R rows sample; tensors are where the logits are.

    columns: by name. places: where the sampled tokens go; what is before them in the rows is known.
    asked: see `SampledRows`. index_R: the R of them that are meant; None: all.
    """

    columns: Mapping[str, Tensor]
    places: TokenPlaces
    asked: frozenset[str] = frozenset()
    index_R: Tensor | None = None

    def of_rows(self, index_R: Tensor) -> SamplingMetadata:
        """How these of the R rows sample; index_R on the device of the columns."""
        assert self.index_R is None
        return SamplingMetadata(self.columns, self.places, self.asked, index_R)

    def column(self, name: str) -> Tensor:
        """A column's values of the rows that are meant, [R], of its dtype."""
        return self._chosen(self.columns[name])

    @property
    def known_tokens_RL(self) -> Tensor:
        """int32, what rows hold so far, prompt and output; from num_tokens_R on any token ids.

        A row that has NO_TOKEN ends, but may be computed on until the host has seen it: then that
        is token 0 here, for this is mostly used as an index.
        """
        return self.places.token_table[self._chosen(self.places.rows_R)].clamp_(min=0)

    @property
    def num_tokens_R(self) -> Tensor:
        """int64, how many tokens rows hold so far: the place of the one that they sample."""
        return self._chosen(self.places.positions_R)

    @property
    def noise(self) -> Noise:
        """How rows choose among their tokens."""
        return Noise(self.column("temperature"), self.column("seed"), self.num_tokens_R)

    @property
    def filters(self) -> Filters:
        """Which tokens rows may sample."""
        return Filters(self.column("top_k"), self.column("top_p"), self.column("min_p"))

    def _chosen(self, values: Tensor) -> Tensor:
        return values if self.index_R is None else values[self.index_R]


def numpy_dtype(dtype: torch.dtype) -> np.dtype:
    """The same dtype in numpy."""
    return torch.empty(0, dtype=dtype).numpy().dtype
