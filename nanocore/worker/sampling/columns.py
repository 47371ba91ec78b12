"""Sampling parameters of each row: columns, each declared once, and lists of tokens.

From `COLUMNS` follow the table that the persistent batch keeps, the columns that a step's sampling
reads, and the largest step that memory is sized by. Lists that rows name are kept
for as long as their requests run, and packed into one column when a step's rows are not those of
the step before. A parameter that changes logits is a line in `COLUMNS` or a list, and a part of
`Kernels.edit_logits`. Shape suffixes: see `nanocore.kernels.interface`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Literal

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nanocore.kernels.logit_edits import LogitEdits, TokenLists
from nanocore.kernels.sampling import Filters, Noise, TokenPlaces
from nanocore.protocol.fields import (
    MAX_ALLOWED_TOKEN_IDS,
    MAX_BAD_WORDS,
    MAX_BAD_WORDS_TOKENS,
    MAX_INT32,
    MAX_LOGIT_BIASES,
)
from nanocore.protocol.sampling import EngineSamplingParams
from nanocore.worker.plan import NewRow

Ints = NDArray[np.int32]


class RowLists(msgspec.Struct, frozen=True):
    """One row's. biases: the bits of float32. bad: tokens of sequences of these lengths."""

    allowed: Ints
    biased: Ints
    biases: Ints
    stops: Ints
    bad_lengths: Ints
    bad: Ints

    @classmethod
    def of(cls, new: NewRow) -> RowLists | None:
        """Lists that a new row names; None: nothing. Stops are named if there are min_tokens."""
        sampling = new.sampling
        stops = new.stop_token_ids if sampling.min_tokens else []
        bad = sampling.bad_words_token_ids
        if not (sampling.allowed_token_ids or sampling.logit_bias or stops or bad):
            return None
        biases = np.array([bias for _, bias in sampling.logit_bias], np.float32)
        return cls(
            allowed=_ints(sampling.allowed_token_ids or ()),
            biased=_ints([token_id for token_id, _ in sampling.logit_bias]),
            biases=biases.view(np.int32),
            stops=_ints(stops),
            bad_lengths=_ints([len(sequence) for sequence in bad]),
            bad=_ints([token_id for sequence in bad for token_id in sequence]),
        )


def _ints(values: Sequence[int]) -> Ints:
    return np.array(values, np.int32)


NO_LISTS: Final = RowLists(*[_ints(())] * 6)


class PackedLists(msgspec.Struct, frozen=True):
    """Lists of some rows. column: int32; sizes: of its parts, see `TokenLists.of`."""

    column: Ints
    sizes: list[int]

    @classmethod
    def of(cls, rows: Sequence[RowLists]) -> PackedLists:
        """Pack the lists of these rows, of which there is one at least, in their order."""
        allowed, biased, biases, stops, bad_lengths, bad = (
            [getattr(row, name) for row in rows] for name in RowLists.__struct_fields__
        )
        parts = [
            _starts(allowed), *allowed,
            _starts(biased), *biased, *biases,
            _starts(stops), *stops,
            _starts(bad_lengths), _cumulated(np.concatenate(bad_lengths)), *bad,
        ]  # fmt: skip
        num_starts = len(rows) + 1
        num_biases, num_sequences = _total(biased), _total(bad_lengths)
        sizes = [num_starts, _total(allowed), num_starts, num_biases, num_biases]
        sizes += [num_starts, _total(stops), num_starts, num_sequences + 1, _total(bad)]
        return cls(np.concatenate(parts), sizes)


def _total(lists: list[Ints]) -> int:
    return sum(map(len, lists))


def _starts(lists: list[Ints]) -> Ints:
    return _cumulated(np.array([len(one) for one in lists]))


def _cumulated(lengths: NDArray[np.integer]) -> Ints:
    sums = np.zeros(len(lengths) + 1, np.int32)
    np.cumsum(lengths, out=sums[1:])
    return sums


def longest_lists(vocab_size: int) -> dict[str, Any]:
    """Sampling parameters that take as much memory as any."""
    biased = range(min(vocab_size, MAX_LOGIT_BIASES))
    return {
        "allowed_token_ids": [0] * MAX_ALLOWED_TOKEN_IDS,
        "logit_bias": [(token_id, 1.0) for token_id in biased],
        "bad_words_token_ids": [[0] * (MAX_BAD_WORDS_TOKENS // MAX_BAD_WORDS)] * MAX_BAD_WORDS,
    }


_MAX_FLOAT32: Final = float(np.finfo(np.float32).max)  # as good as any temperature above it


def _temperature(new: NewRow, vocab_size: int) -> float:
    return 0.0 if new.sampling.greedy else min(new.sampling.temperature, _MAX_FLOAT32)


def _top_k(new: NewRow, vocab_size: int) -> int:
    top_k = new.sampling.top_k
    return top_k if 0 < top_k < vocab_size else MAX_INT32


def _min_tokens(new: NewRow, vocab_size: int) -> int:
    return new.sampling.min_tokens if new.stop_token_ids else 0


class Column(msgspec.Struct, frozen=True):
    """A number that each row keeps for as long as its request runs.

    name: the sampling parameter's, if it comes from one. default: of rows that do not ask for it.

    kind: a "row" column is what every row samples with. A value of another kind asks for more if it
    is not the default: a "filter" leaves fewer tokens to choose from (and means nothing to a greedy
    row), "logits" are edited, in greedy rows too.

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
        """Value of a row that is added; the default of filters in greedy rows."""
        if self.kind == "filter" and new.sampling.greedy:
            return self.default
        return getattr(new.sampling, self.name) if self.of is None else self.of(new, vocab_size)


COLUMNS: Final = (
    Column("seed", torch.int64, 0, "row", lambda new, _: new.seed),
    Column("num_prompt_tokens", torch.int64, 0, "row", lambda new, _: new.num_prompt_tokens),
    Column("temperature", torch.float32, 0.0, "row", _temperature),
    Column("min_tokens", torch.int32, 0, "logits", _min_tokens, costliest=1),
    Column("repetition_penalty", torch.float32, 1.0, "logits", costliest=1.1),
    Column("frequency_penalty", torch.float32, 0.0, "logits", costliest=0.1),
    Column("presence_penalty", torch.float32, 0.0, "logits", costliest=0.1),
    Column("top_k", torch.int32, MAX_INT32, "filter", _top_k),
    Column("top_p", torch.float32, 1.0, "filter", costliest=0.999),
    Column("min_p", torch.float32, 0.0, "filter"),
)


def costliest_sampling(vocab_size: int) -> EngineSamplingParams:
    """Sampling parameters of a row that takes as much memory as any."""
    costliest = {
        column.name: column.costliest for column in COLUMNS if column.costliest is not None
    }
    return EngineSamplingParams(**costliest, **longest_lists(vocab_size))


ColumnKinds = tuple[tuple[str, str, int], ...]
"""Columns' names, dtypes (numpy's letters for them: dtypes take long to hash) and lengths."""


def kinds_of(columns: Mapping[str, NDArray]) -> ColumnKinds:
    return tuple([(name, column.dtype.char, len(column)) for name, column in columns.items()])


class SampledRows:
    """The rows of a step's S sample slots, on the host; kept while the same rows decode.

    columns: what sampling reads: each of `COLUMNS`, [S] by name; processed_P: int64 indices of the
    S that ask for more than the best token, noise added, first those whose logits are edited;
    lists_L: the lists of these, of which there are none if no logits are edited. sizes: of its
    parts. all_greedy: every row takes its most likely token.
    """

    def __init__(
        self,
        columns: dict[str, NDArray],
        processed: NDArray[np.int64],
        packed: PackedLists | None = None,
    ) -> None:
        self.all_greedy = not columns["temperature"].any()
        self.num_processed = len(processed)
        self.sizes = None if packed is None else packed.sizes
        column = _ints(()) if packed is None else packed.column
        self.columns = columns | {"processed_P": processed, "lists_L": column}
        self.kinds = kinds_of(self.columns)


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
        self._is_edited = np.zeros(num_rows, bool)
        self._lists: dict[int, RowLists] = {}

    def set_row(self, new: NewRow) -> None:
        """Take in how the request samples that takes this row, instead of its last owner."""
        values = {column.name: column.value(new, self._vocab_size) for column in COLUMNS}
        asked = {
            column.kind
            for column in COLUMNS
            if column.kind != "row" and values[column.name] != column.default
        }
        lists = RowLists.of(new)
        is_edited = "logits" in asked or lists is not None
        is_processed = is_edited or bool(asked)
        if is_processed and new.sampling.greedy:
            # Logits are changed and then filtered. One token is left, whatever the noise.
            values |= {"temperature": 1.0, "top_k": 1}
        for name, value in values.items():
            self._columns[name][new.row] = value
        self._is_processed[new.row], self._is_edited[new.row] = is_processed, is_edited
        self._lists.pop(new.row, None)
        if lists is not None:
            self._lists[new.row] = lists

    def of_rows(self, rows: NDArray[np.int64]) -> SampledRows:
        """Copies of the columns of these rows, [R] in their order."""
        columns = {name: values[rows] for name, values in self._columns.items()}
        processed = self._is_processed[rows].nonzero()[0]
        is_edited = self._is_edited[rows[processed]]
        if not is_edited.any():
            return SampledRows(columns, processed)
        edited = processed[is_edited]
        packed = PackedLists.of([self._lists.get(row, NO_LISTS) for row in rows[edited].tolist()])
        return SampledRows(columns, np.concatenate((edited, processed[~is_edited])), packed)


class SamplingMetadata(msgspec.Struct, frozen=True):
    """Sampling parameters of S sample slots; tensors are where the logits are.

    rows: on the host. fields: its columns, and perhaps more. places: where the sampled tokens go;
    what is before them in the rows is known. index: the slots that are meant, first those with
    lists; None: all.
    """

    rows: SampledRows
    fields: Mapping[str, Tensor]
    places: TokenPlaces
    index: Tensor | None = None

    def of_processed(self) -> SamplingMetadata:
        """The slots that ask for more than the best token, noise added."""
        return SamplingMetadata(self.rows, self.fields, self.places, self.fields["processed_P"])

    @property
    def noise(self) -> Noise:
        position_S = self._chosen(self.places.positions_R)
        return Noise(self._column("temperature"), self._column("seed"), position_S)

    @property
    def filters(self) -> Filters:
        return Filters(self._column("top_k"), self._column("top_p"), self._column("min_p"))

    @property
    def edits(self) -> LogitEdits | None:
        """Edits of the logits of the first of these slots; None: nothing."""
        if self.rows.sizes is None:
            return None
        lists = TokenLists.of(self.fields["lists_L"], self.rows.sizes)

        def first(values: Tensor) -> Tensor:
            return self._chosen(values, lists.num_rows)

        return LogitEdits(
            token_table=self.places.token_table,
            rows_R=first(self.places.rows_R),
            num_tokens_R=first(self.places.positions_R),
            lists=lists,
            **{f"{name}_R": first(self.fields[name]) for name in _EDITING},
        )

    def _column(self, name: str) -> Tensor:
        return self._chosen(self.fields[name])

    def _chosen(self, values: Tensor, num_slots: int | None = None) -> Tensor:
        if self.index is None:
            return values[:num_slots]
        return values.index_select(0, self.index[:num_slots])


_EDITING: Final = (
    "num_prompt_tokens",
    *(column.name for column in COLUMNS if column.kind == "logits"),
)


def numpy_dtype(dtype: torch.dtype) -> np.dtype:
    return torch.empty(0, dtype=dtype).numpy().dtype
