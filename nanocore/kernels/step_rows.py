"""A step's rows in the tables of a device beside the host: what is before its layers, and after.

The tables hold the tokens and the KV blocks of all rows, and are changed in the order of the steps
(`nanocore.worker.device.step_memory` owns them). What is here in plain torch is the reference for
kernels that do it in one launch. Shape suffixes: see `interface`; further, W appended blocks.
"""

from __future__ import annotations

import msgspec
from torch import Tensor


class StepRows(msgspec.Struct, frozen=True):
    """Places of a step's tokens and blocks in the tables.

    token_table: int32 [rows, max_model_len + 1]. block_table: int32 [rows, M], of blocks of
    block_size tokens. rows_T, positions_T: int64, the place of each token in the token table.
    rows_B: int64, the row of each sequence; seq_lens_B: see `AttentionMetadata`. block_rows_W,
    block_columns_W: int64, and block_ids_W: int32, blocks that rows got for this step, theirs or
    others. Places that are there twice, as padding is, have equal ids.
    """

    token_table: Tensor
    block_table: Tensor
    block_size: int
    rows_T: Tensor
    positions_T: Tensor
    rows_B: Tensor
    seq_lens_B: Tensor
    block_rows_W: Tensor
    block_columns_W: Tensor
    block_ids_W: Tensor

    def append_blocks(self) -> Tensor:
        """Write the blocks that rows got; then the block ids of the sequences, int32 [B, M]."""
        self.block_table[self.block_rows_W, self.block_columns_W] = self.block_ids_W
        return self.block_table.index_select(0, self.rows_B)

    def token_ids(self) -> Tensor:
        """Token ids of the step, from the token table, int64 [T]."""
        return self.token_table[self.rows_T, self.positions_T].long()


class TokenPlaces(msgspec.Struct, frozen=True):
    """Places of sampled tokens in the token table; rows_R, positions_R: int64."""

    token_table: Tensor
    rows_R: Tensor
    positions_R: Tensor

    def write(self, token_ids_R: Tensor) -> None:
        """Write int64 [R], each to its place; rows are distinct, but for padding."""
        self.token_table[self.rows_R, self.positions_R] = token_ids_R.int()
