"""The KV blocks of every row, on the host: to find slots and, on a CPU, for attention.

Attention reads the rows of a step where they are, so a step writes the blocks that were appended,
and nothing that grows with contexts.
"""

from __future__ import annotations

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray


class AppendedBlocks(msgspec.Struct, frozen=True):
    """Blocks and their places in the table; all int32 of the same length."""

    rows: NDArray[np.int32]
    columns: NDArray[np.int32]
    block_ids: NDArray[np.int32]


class BlockTable:
    """Block ids by row.

    ids: int32 [max_num_seqs, num_columns]; entries past num_blocks of a row are ids that it or
    another request once had there, or 0. table: the same memory as a tensor.
    """

    def __init__(self, max_num_seqs: int, num_columns: int) -> None:
        self.ids = np.zeros((max_num_seqs, num_columns), np.int32)
        self.num_blocks = np.zeros(max_num_seqs, np.int64)
        self.table = torch.from_numpy(self.ids)

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
        return AppendedBlocks(rows, columns.astype(np.int32), block_ids)
