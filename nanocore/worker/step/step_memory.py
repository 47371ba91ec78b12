"""A step's columns in one piece of memory; and the rows' tables, which it reads.

What a graph reads is declared in `STEP_FIELDS`; other columns have the names, dtypes and lengths
that they have on the host. Layout, copy to a device and a step's inputs there follow from that. A
graph reads its inputs at the addresses it was captured with, so a step that it replays is padded to
the graph's shape: padding tokens belong to a spare row, have no slot, and make up sequences of
length 0. A step takes its token ids from the token table and writes the sampled ones to it, so the
next step can be begun before the host has seen them (mini-sglang's token table). Shape suffixes:
see `nanocore.kernels.interface`; further, W blocks that were appended, and N slots without padding.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from functools import lru_cache
from typing import Final

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nanocore.kernels.sampling import TokenPlaces
from nanocore.kernels.step import StepInputs, StepRows
from nanocore.worker.plan import SchedulerOutput
from nanocore.worker.sampling.columns import ColumnKinds
from nanocore.worker.step.batch_step import BatchStep, ints, running_counts, zeros
from nanocore.worker.step.lanes import LANES


class AppendedBlocks(msgspec.Struct, frozen=True):
    """Blocks and their places in `StepRows.block_tables`; all int32 of the same length."""

    rows: NDArray[np.int32]
    columns: NDArray[np.int32]
    block_ids: NDArray[np.int32]


class BlockTable:
    """Block ids by group of layers and row; a row has as many blocks in each group.

    ids: int32 [num_groups, num_rows, num_columns]; entries past num_blocks of a row are ids that it
    or another request once had there, or 0.
    """

    def __init__(self, num_rows: int, num_columns: int, num_groups: int = 1) -> None:
        self.ids = np.zeros((num_groups, num_rows, num_columns), np.int32)
        self.num_blocks = np.zeros(num_rows, np.int64)

    def set_row(self, row: int, block_ids: NDArray[np.int32]) -> None:
        """The row has these blocks, from its first token on, and no others; group by group."""
        num_blocks = self.num_blocks[row] = len(block_ids) // len(self.ids)
        self.ids[:, row, :num_blocks] = block_ids.reshape(len(self.ids), -1)

    def append(self, rows: NDArray[np.int32], block_ids: NDArray[np.int32]) -> AppendedBlocks:
        """Append a block of each group to each of these rows, in their order; group by group."""
        columns = (self.num_blocks[rows] + running_counts(rows)).astype(np.int32)
        self.num_blocks[rows] = columns + 1  # of equal rows the last one is kept
        num_groups, num_rows, num_columns = self.ids.shape
        if num_groups > 1:
            first_G1 = num_rows * np.arange(num_groups, dtype=np.int32)[:, None]
            rows, columns = (first_G1 + rows).ravel(), np.tile(columns, num_groups)
        self.ids.reshape(-1, num_columns)[rows, columns] = block_ids
        return AppendedBlocks(rows, columns, block_ids)

    def slots(
        self, rows_T: NDArray[np.int64], positions_T: NDArray[np.int64], block_size: int
    ) -> NDArray[np.int64]:
        """Find where K and V of these tokens go, int64 [num_groups, T]."""
        columns_T, offsets_T = np.divmod(positions_T, block_size)
        if len(self.ids) == 1:  # cheaper than with the slice
            blocks_GT = self.ids[0][rows_T, columns_T][None]
        else:
            blocks_GT = self.ids[:, rows_T, columns_T]
        return np.multiply(blocks_GT, block_size, dtype=np.int64) + offsets_T


NO_BLOCKS: Final = AppendedBlocks(*(np.zeros(0, np.int32) for _ in range(3)))


class StepShape(msgspec.Struct, frozen=True):
    """Numbers of tokens, sequences, slots and appended blocks of a step.

    is_uniform: every sequence is a decode. decode_tokens: the most tokens of one. num_groups: of
    layers.
    """

    num_tokens: int
    num_seqs: int
    num_slots: int
    num_blocks: int
    is_uniform: bool
    decode_tokens: int = 1
    num_groups: int = 1

    @classmethod
    def of(
        cls, step: BatchStep, appended: AppendedBlocks, num_slots: int, decode_tokens: int
    ) -> StepShape:
        """The shape of exactly this step, without padding."""
        num_seqs = len(step.order.rows_B)
        return cls(
            num_tokens=len(step.positions_T),
            num_seqs=num_seqs,
            num_slots=num_slots,
            num_blocks=len(appended.rows),
            is_uniform=step.order.num_decodes == num_seqs,
            decode_tokens=decode_tokens,
            num_groups=len(step.slots_GT),
        )


class Field(msgspec.Struct, frozen=True):
    """A column. dim: the suffix that says how long it is. padding: None for the spare row."""

    name: str
    dtype: torch.dtype
    dim: str
    padding: float | None = 0


_LONG, _INT = torch.int64, torch.int32

STEP_FIELDS: Final = (
    Field("rows_T", _LONG, "T", None),
    Field("positions_T", _LONG, "T"),
    Field("slots_GT", _LONG, "GT", -1),
    Field("rows_B", _LONG, "B", None),
    Field("seq_lens_B", _INT, "B"),
    Field("query_start_A", _INT, "A"),
    Field("num_decodes_1", _INT, "1"),
    Field("sample_index_R", _LONG, "R"),
    Field("num_right_B", _INT, "B"),
    Field("num_drafts_B", _INT, "B"),
    Field("block_rows_W", _LONG, "W", None),
    Field("block_columns_W", _LONG, "W"),
    Field("block_ids_W", _INT, "W"),
)
"""What a graph reads; and then the lanes. Columns behind these, which sampling reads and of which
some steps have more than others, are not padded: each is as long as it is on the host."""


class StepLayout:
    """Columns, one behind the other.

    num_bytes: of all, a multiple of 16. places: of each its first byte, its end, and its dtype.
    padding: of those that may be longer than what is written; None is the spare row. Two are equal
    if they are the same one: `layout_of` keeps those it makes.
    """

    def __init__(
        self,
        columns: Iterable[tuple[str, torch.dtype, int]],
        padding: Mapping[str, float | None] | None = None,
    ) -> None:
        self.num_bytes = 0
        self.padding = padding or {}
        self.places: dict[str, tuple[int, int, torch.dtype]] = {}
        for name, dtype, length in columns:
            end = self.num_bytes + length * dtype.itemsize
            self.places[name] = self.num_bytes, end, dtype
            self.num_bytes = -(-end // _ALIGNMENT) * _ALIGNMENT


class Fields(dict[str, Tensor]):
    """The columns of a layout in uint8 memory, made as they are asked for."""

    def __init__(self, layout: StepLayout, memory: Tensor) -> None:
        self._layout, self._memory = layout, memory

    def __missing__(self, name: str) -> Tensor:
        start, end, dtype = self._layout.places[name]
        view = self[name] = self._memory[start:end].view(dtype)
        return view


_ALIGNMENT: Final = 16
"""Bytes. Triton compiles a kernel anew for pointers that are multiples of it and for those that are
not, which must not happen in the middle of serving."""


@lru_cache(maxsize=512)
def layout_of(shape: StepShape | None, columns: ColumnKinds) -> StepLayout:
    """Layout of what a graph of this shape reads, and then of these columns, as they are."""
    behind = [
        (name, torch.from_numpy(np.empty(0, dtype)).dtype, length)
        for name, dtype, length in columns
    ]
    if shape is None:
        return StepLayout(behind)
    lengths = {
        "T": shape.num_tokens,
        "GT": shape.num_groups * shape.num_tokens,
        "B": shape.num_seqs,
        "A": shape.num_seqs + 1,
        "R": shape.num_slots,
        "W": shape.num_blocks,
        "1": 1,
    }
    fields = _graph_fields()
    of_graph = [(field.name, field.dtype, lengths[field.dim]) for field in fields]
    return StepLayout(of_graph + behind, {field.name: field.padding for field in fields})


def _graph_fields() -> list[Field]:
    lanes = [Field(lane.name, lane.dtype, "T", lane.default) for lane in LANES]
    return [*STEP_FIELDS, *lanes]


def step_columns(
    step: BatchStep, appended: AppendedBlocks, slot_index: NDArray[np.int64], shape: StepShape
) -> dict[str, NDArray]:
    """The columns of `STEP_FIELDS`. shape: what the step is padded to."""
    order = step.order
    return {
        "rows_T": order.rows_T,
        "positions_T": step.positions_T,
        "slots_GT": _padded_slots(step.slots_GT, shape),
        "rows_B": order.rows_B,
        "seq_lens_B": step.seq_lens_B,
        "query_start_A": _query_starts(order.query_start_A, shape),
        # In a shape of decodes alone, padding counts as decodes too.
        "num_decodes_1": _number(shape.num_seqs if shape.is_uniform else order.num_decodes),
        "sample_index_R": slot_index,
        "num_right_B": zeros(len(order.rows_B)),  # the device knows it: see `DraftTracker`
        "num_drafts_B": step.num_drafts_B,
        "block_rows_W": appended.rows,
        "block_columns_W": appended.columns,
        "block_ids_W": appended.block_ids,
        **step.lanes,
    }


def padding_columns(shape: StepShape) -> dict[str, NDArray]:
    """The columns of a step of nothing but padding: of decodes, or else of chunks."""
    return {
        **{field.name: np.zeros(0) for field in _graph_fields()},
        "query_start_A": _query_starts(np.zeros(1, np.int64), shape),
        "num_decodes_1": _number(shape.num_seqs if shape.is_uniform else 0),
    }


def _padded_slots(slots_GT: NDArray[np.int64], shape: StepShape) -> NDArray[np.int64]:
    num_padding = shape.num_tokens - slots_GT.shape[1]
    if num_padding:
        slots_GT = np.pad(slots_GT, ((0, 0), (0, num_padding)), constant_values=-1)
    return slots_GT.ravel()


@lru_cache(maxsize=512)
def _number(number: int) -> NDArray[np.int64]:
    return np.array([number])


def _query_starts(starts_A: NDArray[np.int64], shape: StepShape) -> NDArray[np.int64]:
    # Each padding sequence gets as many of the padding tokens as a decode, and the last one the
    # rest, where it may be a chunk.
    num_padding = shape.num_seqs + 1 - len(starts_A)
    if num_padding == 0:
        return starts_A
    counts = shape.decode_tokens * np.arange(1, num_padding + 1)
    ends = np.minimum(starts_A[-1] + counts, shape.num_tokens)
    if not shape.is_uniform:
        ends[-1] = shape.num_tokens
    return np.concatenate((starts_A, ends))


class NewTokens(msgspec.Struct, frozen=True):
    """Tokens and blocks that the tables do not hold yet, as one int32 column.

    rows: (row, tokens, blocks) of rows that begin, in the order of the column: for each its tokens
    and then its blocks. num_sampled: tokens that another stage sampled; the column ends with their
    rows, their positions and themselves.
    """

    column: NDArray[np.int32]
    rows: list[tuple[int, int, int]] = []
    num_sampled: int = 0

    @classmethod
    def of(
        cls, plan: SchedulerOutput, sampled: Sequence[tuple[NDArray[np.int32], ...]]
    ) -> NewTokens:
        """Collect what is new in a plan, and in what was sampled: rows, positions and tokens."""
        if not (plan.added or sampled):
            return _NOTHING_NEW
        rows: list[tuple[int, int, int]] = []
        parts: list[NDArray[np.int32]] = []
        for new in plan.added:
            token_ids, block_ids = ints(new.token_ids), ints(new.block_ids)
            rows.append((new.row, len(token_ids), len(block_ids)))
            parts += [token_ids, block_ids]
        parts += [np.concatenate(part) for part in zip(*sampled, strict=True)]
        return cls(np.concatenate(parts), rows, sum(len(own) for own, *_ in sampled))


_NOTHING_NEW: Final = NewTokens(np.zeros(0, np.int32))


class RowTables:
    """Tables of max_num_seqs rows and a spare one, where the model runs.

    token_table: int32 [rows, max_model_len + 1]; the last token is never computed. block_ids: int32
    [groups, rows, blocks of max_model_len tokens]; the host's own where it runs there.
    """

    def __init__(
        self, blocks: BlockTable, max_model_len: int, block_size: int, device: torch.device | None
    ) -> None:
        _, num_rows, _ = blocks.ids.shape
        self.spare_row = num_rows - 1
        self.block_size = block_size
        self.max_model_len = max_model_len
        if device is None or device.type == "cpu":
            # Memory from numpy is not touched before it is used.
            self.token_table = torch.from_numpy(np.zeros((num_rows, max_model_len + 1), np.int32))
        else:
            size = num_rows, max_model_len + 1
            self.token_table = torch.zeros(size, dtype=torch.int32, device=device)
        self.block_ids = torch.from_numpy(blocks.ids)
        if device is not None:
            self.block_ids = torch.zeros_like(self.block_ids, device=device)
        self._block_tables = self.block_ids.flatten(0, 1)

    def take(self, column: Tensor, new: NewTokens) -> None:
        """Write what is new; column: that of `new`, where the model runs."""
        if new.num_sampled:
            column, sampled = column[: -3 * new.num_sampled], column[-3 * new.num_sampled :]
            rows, positions, token_ids = sampled.view(3, -1)
            self.token_table[rows.long(), positions.long()] = token_ids
        for row, num_tokens, num_blocks in new.rows:
            self.token_table[row, :num_tokens] = column[:num_tokens]
            column = column[num_tokens:]
            ids_GN = column[:num_blocks].view(len(self.block_ids), -1)
            self.block_ids[:, row, : ids_GN.shape[1]] = ids_GN
            column = column[num_blocks:]

    def of_full_group(self) -> RowTables:
        """The same tables, with the blocks of the first group alone."""
        tables = copy(self)
        tables.block_ids = self.block_ids[:1]
        tables._block_tables = self.block_ids[0]
        return tables

    def append_blocks(self, fields: Mapping[str, Tensor]) -> None:
        """Write the blocks that a step's rows got to the table."""
        self._rows(fields).append_blocks()

    def find_slots(self, fields: Mapping[str, Tensor]) -> None:
        """Find anew where K and V of a step's tokens go, whose positions have changed."""
        self.append_blocks(fields)
        positions_T, size = fields["positions_T"], self.block_size
        slots_GT = fields["slots_GT"].view(self.block_ids.shape[0], -1)
        blocks_GT = self.block_ids[:, fields["rows_T"], positions_T // size]
        found_GT = blocks_GT.long() * size + positions_T % size
        slots_GT.copy_(torch.where(slots_GT < 0, slots_GT, found_GT))

    def inputs(self, fields: Mapping[str, Tensor], bounds: HostBounds) -> StepInputs:
        """Inputs of a step of these fields."""
        return StepInputs(
            rows=self._rows(fields),
            num_decodes=bounds.num_decodes,
            query_start=bounds.query_start,
            seq_lens=bounds.seq_lens,
            num_decodes_1=fields["num_decodes_1"],
            query_start_A=fields["query_start_A"],
            slots_GT=fields["slots_GT"],
            sample_index_R=fields["sample_index_R"],
            decode_tokens=bounds.decode_tokens,
            lanes={lane.name: fields[lane.name] for lane in LANES},
        )

    def _rows(self, fields: Mapping[str, Tensor]) -> StepRows:
        columns = {name: fields[name] for name in _ROW_FIELDS}
        return StepRows(
            token_table=self.token_table,
            block_tables=self._block_tables,
            block_size=self.block_size,
            num_groups=self.block_ids.shape[0],
            **columns,
        )

    def places(self, fields: Mapping[str, Tensor], num_slots: int | None = None) -> TokenPlaces:
        """Places of the tokens of the step's first slots, or of all."""
        rows, positions = fields["slot_rows_N"], fields["slot_positions_N"]
        if num_slots is not None:
            rows, positions = rows[:num_slots], positions[:num_slots]
        return TokenPlaces(self.token_table, rows, positions)


_ROW_FIELDS: Final = (
    "rows_T", "positions_T", "rows_B", "seq_lens_B", "num_right_B", "num_drafts_B", "block_rows_W",
    "block_columns_W", "block_ids_W",
)  # fmt: skip


class HostBounds(msgspec.Struct, frozen=True):
    """Bounds of a step that kernels get from the host: see `AttentionMetadata`."""

    num_decodes: int
    query_start: list[int]
    seq_lens: list[int]
    decode_tokens: int

    @classmethod
    def of_step(cls, step: BatchStep, decode_tokens: int) -> HostBounds:
        """Exact counts of a step that runs once."""
        order = step.order
        return cls(order.num_decodes, order.query_start, step.seq_lens_B.tolist(), decode_tokens)

    @classmethod
    def of_shape(cls, shape: StepShape, max_model_len: int) -> HostBounds:
        """Upper bounds of any step of this shape."""
        num_seqs = shape.num_seqs
        starts = [0] + [shape.num_tokens] * num_seqs
        if shape.is_uniform:
            starts = [number * shape.decode_tokens for number in range(num_seqs + 1)]
        return cls(num_seqs, starts, [max_model_len] * num_seqs, shape.decode_tokens)
