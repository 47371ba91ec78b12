"""The rows' tokens and blocks on a device: two tables, changed in the order of the steps.

A step takes its token ids from the table and writes the sampled ones to it, so the next step can be
begun before the host has seen them (the token table of mini-sglang). One row more than requests can
have takes what padding writes. Shape suffixes: see `nanocore.kernels.interface`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nanocore.kernels.step_rows import StepRows, TokenPlaces
from nanocore.worker.batch.input_batch import ints
from nanocore.worker.device.step_memory import StepFields
from nanocore.worker.plan import SchedulerOutput


@dataclass(frozen=True, slots=True)
class NewTokens:
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
        """What a plan brings; sampled: rows, positions and tokens, or empty. None: nothing new."""
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
        self.spare_row, self.block_size = max_num_seqs, block_size
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
        """What a step finds in the tables, and the blocks that rows got for it."""
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
        """Where the tokens go that the step samples."""
        return TokenPlaces(self.token_table, step.sample_rows_R, step.sample_positions_R)
