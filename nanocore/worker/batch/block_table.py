"""The KV blocks of every row, on the host: to find slots and, on a CPU, for attention.

Attention wants the rows of a step in the step's order. Where they are consecutive that is a view;
where ended rows have left gaps it is a copy. For rows that decode step after step it is made once
and then kept up to date by the same differences as the table, until it is forgotten because a row
came or went. So a step writes the blocks that were appended, and nothing that grows with contexts.
Shape suffixes: see `nanocore.kernels.interface`.
"""

from __future__ import annotations

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

SPARE_COLUMNS = 64
"""Extra columns of a copy, for blocks that its rows take before it must be made again."""


class _Selection(msgspec.Struct, frozen=True):
    """Some rows' table. place: of every row its index in B, -1 for others; None for a view."""

    table_BM: Tensor
    place: NDArray[np.int64] | None


class AppendedBlocks(msgspec.Struct, frozen=True):
    """Blocks and their places in the table; all int32 of the same length."""

    rows: NDArray[np.int32]
    columns: NDArray[np.int32]
    block_ids: NDArray[np.int32]


class BlockTable:
    """Block ids by row.

    ids: int32 [max_num_seqs, num_columns]; entries past num_blocks of a row are ids that it or
    another request once had there, or 0.
    """

    def __init__(self, max_num_seqs: int, num_columns: int) -> None:
        self.ids = np.zeros((max_num_seqs, num_columns), np.int32)
        self.num_blocks = np.zeros(max_num_seqs, np.int64)
        self._table = torch.from_numpy(self.ids)
        self._kept: dict[int, _Selection] = {}

    def set_row(self, row: int, block_ids: NDArray[np.int32]) -> None:
        """The row has these blocks, from its first token on, and no others."""
        self.num_blocks[row] = len(block_ids)
        self.ids[row, : len(block_ids)] = block_ids

    def append(self, rows: NDArray[np.int32], block_ids: NDArray[np.int32]) -> AppendedBlocks:
        """Append a block to each of these rows; those of one row are adjacent."""
        # Number the blocks of a row from the start of their run.
        index = np.arange(len(rows))
        is_start = np.ones(len(rows), bool)
        np.not_equal(rows[1:], rows[:-1], out=is_start[1:])
        start = np.maximum.accumulate(index * is_start)
        columns = self.num_blocks[rows] + index - start
        self.num_blocks[rows] = columns + 1  # of equal rows the last one is kept
        self.ids[rows, columns] = block_ids
        for key, selection in list(self._kept.items()):
            if selection.place is None:
                continue
            if columns.max() >= selection.table_BM.shape[1]:
                del self._kept[key]
                continue
            place = selection.place[rows]
            among = place >= 0
            if among.any():
                selection.table_BM.numpy()[place[among], columns[among]] = block_ids[among]
        return AppendedBlocks(rows, columns.astype(np.int32), block_ids)

    def select(self, rows_B: NDArray[np.int64]) -> Tensor:
        """Block ids of these rows, int32 [B, M], until the next change."""
        return self._select(rows_B).table_BM

    def select_kept(self, key: int, rows_B: NDArray[np.int64]) -> Tensor:
        """Select rows as `select` does, once for a key; appended blocks are added to what is kept.

        rows_B: the same in every call with this key, until `clear_kept`.
        """
        selection = self._kept.get(key)
        if selection is None:
            selection = self._kept[key] = self._select(rows_B)
        return selection.table_BM

    def clear_kept(self) -> None:
        """Keep no selection any longer: rows were started anew, or a key stands for others now."""
        self._kept.clear()

    def _select(self, rows_B: NDArray[np.int64]) -> _Selection:
        if (np.diff(rows_B) == 1).all():
            first = int(rows_B[0])
            return _Selection(self._table[first : first + len(rows_B)], None)
        used = self._table[:, : int(self.num_blocks[rows_B].max()) + SPARE_COLUMNS]
        place = np.full(len(self.ids), -1)
        place[rows_B] = np.arange(len(rows_B))
        return _Selection(used.index_select(0, torch.from_numpy(rows_B)), place)
