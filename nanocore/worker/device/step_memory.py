"""A step's inputs in one piece of memory, and the rows' tables on the device that it reads.

One copy brings the inputs to the device. Their layout depends on the step's shape alone: a graph
reads its inputs at the addresses it was captured with, so a step that it replays is padded to the
graph's shape. Padding tokens belong to a spare row, have no slot, and make up sequences of length
0. A step takes its token ids from the token table and writes the sampled ones to it, so the next
step can be begun before the host has seen them (mini-sglang's token table). Shape suffixes: see
`nanocore.kernels.interface`; further, W blocks that were appended.
"""

from __future__ import annotations

from functools import partial
from typing import Final

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nanocore.kernels.sampling import TokenPlaces
from nanocore.kernels.step import StepRows
from nanocore.worker.batch.batch_step import BatchStep, ints
from nanocore.worker.batch.block_table import AppendedBlocks
from nanocore.worker.plan import SchedulerOutput
from nanocore.worker.sampling.columns import COLUMNS, SampledRows


class StepShape(msgspec.Struct, frozen=True):
    """Numbers of tokens, sequences, sampling rows and appended blocks of a step.

    is_uniform: every sequence is a decode.
    """

    num_tokens: int
    num_seqs: int
    num_samples: int
    num_blocks: int
    is_uniform: bool

    @classmethod
    def of(cls, step: BatchStep, appended: AppendedBlocks) -> StepShape:
        """The shape of exactly this step, without padding."""
        num_seqs = len(step.order.rows_B)
        return cls(
            num_tokens=len(step.positions_T),
            num_seqs=num_seqs,
            num_samples=len(step.sample_rows),
            num_blocks=len(appended.rows),
            is_uniform=step.order.num_decodes == num_seqs,
        )


class StepFields(msgspec.Struct, frozen=True):
    """The inputs, as views of the memory.

    rows_T, rows_B: rows of the persistent batch. sample_index_R: which of the T tokens sample;
    sample_rows_R, sample_positions_R: whose, and the places of the sampled tokens. processed_R:
    those of the R rows, first, that ask for more than a plain token. sampling: how rows sample, [R]
    by name; see `sampling.columns`.
    """

    rows_T: Tensor
    positions_T: Tensor
    slots_T: Tensor
    rows_B: Tensor
    sample_index_R: Tensor
    sample_rows_R: Tensor
    sample_positions_R: Tensor
    processed_R: Tensor
    block_rows_W: Tensor
    block_columns_W: Tensor
    seq_lens_B: Tensor
    query_start_A: Tensor
    num_decodes_1: Tensor
    block_ids_W: Tensor
    sampling: dict[str, Tensor]

    @classmethod
    def of(cls, memory: Tensor, shape: StepShape) -> StepFields:
        """Views of uint8 memory of at least `num_bytes(shape)`."""
        views = {f.name: memory[start:end].view(f.dtype) for f, start, end in _layout(shape)}
        return cls(sampling={column.name: views.pop(column.name) for column in COLUMNS}, **views)


class StagedColumns:
    """The same memory on the host, to be written.

    Args:
        memory: uint8, of at least `num_bytes(shape)`. spare_row: for padding.
    """

    def __init__(self, memory: Tensor, shape: StepShape, spare_row: int) -> None:
        self._columns = {
            field.name: memory[start:end].view(field.dtype).numpy()
            for field, start, end in _layout(shape)
        }
        self._num_tokens = shape.num_tokens
        self._num_seqs = shape.num_seqs
        self._is_uniform = shape.is_uniform
        self._spare_row = spare_row

    def fill(self, step: BatchStep, appended: AppendedBlocks, sampled: SampledRows) -> None:
        """Write a step that fits the shape; what is left over becomes padding."""
        order = step.order
        self._write(
            rows_T=order.rows_T,
            positions_T=step.positions_T,
            slots_T=step.slots_T,
            rows_B=order.rows_B,
            sample_index_R=step.sample_index_R,
            sample_rows_R=step.sample_rows,
            sample_positions_R=step.sample_positions,
            processed_R=sampled.processed,
            block_rows_W=appended.rows,
            block_columns_W=appended.columns,
            block_ids_W=appended.block_ids,
            seq_lens_B=step.seq_lens_B,
            **sampled.columns,
        )
        self._write_query_starts(order.query_start_A.numpy())
        self._write_num_decodes(order.num_decodes)

    def fill_with_padding(self) -> None:
        """Write a step of nothing else: of decodes, or else of chunks."""
        self._write(**{name: np.zeros(0) for name in _WRITTEN})
        self._write_query_starts(np.zeros(1, np.int32))
        self._write_num_decodes(0)

    def _write(self, **columns: NDArray) -> None:
        for name, values in columns.items():
            column, count = self._columns[name], len(values)
            column[:count] = values
            if count < len(column):
                column[count:] = self._spare_row if name in _ROWS else _PADDING.get(name, 0)

    def _write_num_decodes(self, num_decodes: int) -> None:
        # In a shape of decodes alone, padding counts as decodes too.
        self._columns["num_decodes_1"][0] = self._num_seqs if self._is_uniform else num_decodes

    def _write_query_starts(self, starts_A: NDArray[np.int32]) -> None:
        # Each padding sequence gets one of the padding tokens, and the last one the rest.
        column = self._columns["query_start_A"]
        column[: len(starts_A)] = starts_A
        if len(column) > len(starts_A):
            ends = starts_A[-1] + np.arange(1, len(column) - len(starts_A) + 1)
            column[len(starts_A) :] = np.minimum(ends, self._num_tokens)
            column[-1] = self._num_tokens


def num_bytes(shape: StepShape) -> int:
    """Bytes of the inputs of a step of this shape."""
    return _aligned(_layout(shape)[-1][2])


class _Field(msgspec.Struct, frozen=True):
    """dim: the suffix that says how many there are."""

    name: str
    dtype: torch.dtype
    dim: str


def _layout(shape: StepShape) -> list[tuple[_Field, int, int]]:
    counts = {
        "T": shape.num_tokens,
        "B": shape.num_seqs,
        "A": shape.num_seqs + 1,
        "R": shape.num_samples,
        "W": shape.num_blocks,
        "1": 1,
    }
    layout, start = [], 0
    for field in _FIELDS:
        end = start + counts[field.dim] * field.dtype.itemsize
        layout.append((field, start, end))
        start = _aligned(end)
    return layout


def _aligned(offset: int) -> int:
    """Fields begin at multiples of 16 bytes: Triton compiles a kernel anew for pointers that do
    and for those that do not, which must not happen in the middle of serving."""
    return -(-offset // _ALIGNMENT) * _ALIGNMENT


_ALIGNMENT: Final = 16
_INT32: Final = frozenset(("seq_lens_B", "query_start_A", "num_decodes_1", "block_ids_W"))
_FIELDS: Final = [
    *(
        _Field(name, torch.int32 if name in _INT32 else torch.int64, name[-1])
        for name in StepFields.__struct_fields__
        if name != "sampling"
    ),
    *(_Field(column.name, column.dtype, "R") for column in COLUMNS),
]
_WRITTEN: Final = [f.name for f in _FIELDS if f.name not in ("query_start_A", "num_decodes_1")]
_ROWS: Final = frozenset(("rows_T", "rows_B", "sample_rows_R", "block_rows_W"))
_PADDING: Final = {"slots_T": -1} | {column.name: column.default for column in COLUMNS}
"""And 0 elsewhere."""


class NewTokens(msgspec.Struct, frozen=True):
    """Tokens and blocks that the host knows and the device does not, as one int32 column.

    rows: (row, tokens, blocks) of rows that begin, in the order of the column: for each its tokens
    and then its blocks. num_sampled: tokens that another stage sampled; the column ends with their
    rows, their positions and themselves.
    """

    column: NDArray[np.int32]
    rows: list[tuple[int, int, int]]
    num_sampled: int

    @classmethod
    def of(cls, plan: SchedulerOutput, sampled: list[NDArray[np.int32]]) -> NewTokens | None:
        """Collect what is new in a plan, if any; sampled: rows, positions, tokens, or empty."""
        rows: list[tuple[int, int, int]] = []
        parts: list[NDArray[np.int32]] = []
        for new in plan.added:
            token_ids, block_ids = ints(new.token_ids), ints(new.block_ids)
            rows.append((new.row, len(token_ids), len(block_ids)))
            parts += [token_ids, block_ids]
        parts += sampled
        if not parts:
            return None
        return cls(np.concatenate(parts), rows, len(sampled[0]) if sampled else 0)


class DeviceRows:
    """Tables of max_num_seqs rows and a spare one.

    token_table: int32 [rows, max_model_len + 1]; the last token is never computed. block_table:
    int32, as many blocks as max_model_len tokens take.
    """

    def __init__(
        self, max_num_seqs: int, max_model_len: int, block_size: int, device: torch.device
    ) -> None:
        self.spare_row = max_num_seqs
        self.block_size = block_size
        self.max_model_len = max_model_len
        num_rows, num_blocks = max_num_seqs + 1, -(-max_model_len // block_size)
        table = partial(torch.zeros, dtype=torch.int32, device=device)
        self.token_table = table(num_rows, max_model_len + 1)
        self.block_table = table(num_rows, num_blocks)

    def take(self, column: Tensor, new: NewTokens) -> None:
        """Write what the host knew; column: that of `new`, on the device."""
        if new.num_sampled:
            column, sampled = column[: -3 * new.num_sampled], column[-3 * new.num_sampled :]
            rows, positions, token_ids = sampled.view(3, -1)
            self.token_table[rows.long(), positions.long()] = token_ids
        for row, num_tokens, num_blocks in new.rows:
            self.token_table[row, :num_tokens] = column[:num_tokens]
            self.block_table[row, :num_blocks] = column[num_tokens : num_tokens + num_blocks]
            column = column[num_tokens + num_blocks :]

    def of_step(self, step: StepFields) -> StepRows:
        """Rows of a step in the tables, with the blocks that rows got for it."""
        return StepRows(
            token_table=self.token_table,
            block_table=self.block_table,
            block_size=self.block_size,
            rows_T=step.rows_T,
            positions_T=step.positions_T,
            rows_B=step.rows_B,
            seq_lens_B=step.seq_lens_B,
            block_rows_W=step.block_rows_W,
            block_columns_W=step.block_columns_W,
            block_ids_W=step.block_ids_W,
        )

    def places(self, step: StepFields) -> TokenPlaces:
        return TokenPlaces(self.token_table, step.sample_rows_R, step.sample_positions_R)
