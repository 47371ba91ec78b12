"""The interface's kernels before, between and after layers, and a step as a whole.

Tables hold the tokens and the KV blocks of all rows, and are changed in the order of the steps
(`nanocore.worker.step.step_memory` owns them). Shape suffixes: see `interface`; further, W appended
blocks.
"""

from __future__ import annotations

import ctypes
from typing import Final, Literal, Protocol

import msgspec
import torch
from torch import Tensor

from nanocore.kernels.attention import AttentionMetadata
from nanocore.kernels.linear_weight import TokenEmbedding

GraphSupport = Literal["never", "decodes", "always"]
"""Steps that a graph can be captured of: none, those with nothing but decodes, or all."""


_NO_PLACES: Final = torch.empty(0, dtype=torch.int64)


class StepRows(msgspec.Struct, frozen=True):
    """Places of a step's tokens and blocks in the tables.

    token_table: int32 [rows, max_model_len + 1]. block_tables: int32 [G * rows, M], of blocks of
    block_size tokens: the rows of the first group of layers, then those of the next. rows_T,
    positions_T: int64, the place of each token in the token table. rows_B: int64, the row of each
    sequence; seq_lens_B: see `AttentionMetadata`. num_drafts_B: int32, the tokens at a sequence's
    end that are drafts; num_right_B: int32, those that were right of the drafts that its row's last
    step ended with. block_rows_W, block_columns_W: int64, and
    block_ids_W: int32, blocks that the tables do not know yet, of these rows or others; none where
    they are the persistent batch's own. Places that are there twice, as padding is, have equal ids.

    Its methods are the reference for kernels that do it in one launch.
    """

    token_table: Tensor
    block_tables: Tensor
    block_size: int
    rows_T: Tensor
    positions_T: Tensor
    rows_B: Tensor
    seq_lens_B: Tensor
    block_rows_W: Tensor = _NO_PLACES
    block_columns_W: Tensor = _NO_PLACES
    block_ids_W: Tensor = _NO_PLACES.int()
    num_groups: int = 1
    num_right_B: Tensor = _NO_PLACES.int()
    num_drafts_B: Tensor = _NO_PLACES.int()

    def append_blocks(self) -> None:
        """Write the appended blocks to the tables."""
        if self.block_ids_W.shape[0]:
            self.block_tables[self.block_rows_W, self.block_columns_W] = self.block_ids_W

    def of_groups(self) -> list[Tensor]:
        """The block table of each group, int32 [rows, M]."""
        if self.num_groups == 1:
            return [self.block_tables]
        return list(self.block_tables.chunk(self.num_groups))

    def block_ids(self) -> list[Tensor]:
        """Block ids of the sequences in each group, int32 [B, M]."""
        return [table.index_select(0, self.rows_B) for table in self.of_groups()]

    def token_ids(self) -> Tensor:
        """Token ids of the step, from the token table, int64 [T]."""
        return self.token_table[self.rows_T, self.positions_T].long()


class BegunStep(msgspec.Struct, frozen=True):
    """What a step's layers begin with.

    block_tables: of each group; for these and table_rows_B see `AttentionMetadata`. x_TE: hidden
    states of the tokens; None without an embedding.
    """

    block_tables: list[Tensor]
    table_rows_B: Tensor | None
    x_TE: Tensor | None


class StepInputs(msgspec.Struct, frozen=True):
    """All that a step reads. For num_decodes and what is behind it see `AttentionMetadata`.

    slots_GT: int64 [G T], `slot_mapping_T` of each group of layers. sample_index_R: int64, which of
    the T tokens' hidden states sample. lanes: [T] by name, what layers are told of each token, if
    anything.
    """

    rows: StepRows
    num_decodes: int
    query_start: list[int]
    seq_lens: list[int]
    num_decodes_1: Tensor
    query_start_A: Tensor
    slots_GT: Tensor
    sample_index_R: Tensor
    decode_tokens: int = 1
    lanes: dict[str, Tensor] = {}

    def attention(self, begun: BegunStep) -> list[AttentionMetadata]:
        """Attention's view of the step in each group of layers: see `KVCache.group`."""
        return [
            AttentionMetadata(
                num_decodes=self.num_decodes,
                query_start=self.query_start,
                seq_lens=self.seq_lens,
                num_decodes_1=self.num_decodes_1,
                query_start_A=self.query_start_A,
                seq_lens_B=self.rows.seq_lens_B,
                block_table=block_table,
                table_rows_B=begun.table_rows_B,
                positions_T=self.rows.positions_T,
                slot_mapping_T=slots_T,
                decode_tokens=self.decode_tokens,
                rows_B=self.rows.rows_B,
                num_right_B=self.rows.num_right_B,
                num_drafts_B=self.rows.num_drafts_B,
            )
            for block_table, slots_T in zip(
                begun.block_tables, self.slots_GT.chunk(self.rows.num_groups), strict=True
            )
        ]


class RankGroup(Protocol):
    """Ranks that each have a part of a sum, and make the same calls in the same order."""

    @property
    def size(self) -> int: ...

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over ranks, the same bits on every rank; x may be overwritten and returned."""


class SharedMemoryGroup:
    """A group as one of its ranks sees it, which gives exchanges a number each, from 1 on.

    Kernels exchange through it as well as `worker/communication` does: either may come after the
    other.

    Args:
        rank, size: this rank, and how many there are. buffer_bytes: of a buffer.
        counters: [8 * size] words of 64 bits; a rank's is every eighth, and says which exchange it
        has entered. buffers: uint8, [2, size, buffer_bytes], of even exchanges and of odd ones.

    entered: what this rank's counter was set to, which nobody else writes.
    """

    def __init__(
        self, rank: int, size: int, buffer_bytes: int, counters: Tensor, buffers: Tensor
    ) -> None:
        self.rank = rank
        self.size = size
        self.buffer_bytes = buffer_bytes
        self.counters = counters
        self.buffers = buffers
        self.entered = ctypes.c_uint64(0)


class Replay(Protocol):
    """Captured kernels, to be run again on the inputs of any step."""

    def __call__(self, inputs: StepInputs) -> Tensor:
        """Run on a step's inputs; the result is valid until the next call."""


class StepKernels(Protocol):
    """What is neither a product nor attention nor sampling: norms, sums, graphs."""

    graph_support: GraphSupport

    def begin_step(self, rows: StepRows, embedding: TokenEmbedding | None) -> BegunStep:
        """All that a step needs before its layers; appended blocks are written to the table."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x / rms(x) * weight over the last dimension; x [..., E], weight [E]; x's dtype.

        x / rms(x) is float32, rounded to the weight's dtype and then multiplied. So a weight of
        x's dtype rounds before the product, as Llama's and Qwen's norms do, and a float32 weight
        after it, as Gemma's do.
        """

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """(rms_norm(x + residual), x + residual), the sum perhaps over residual; all [T, E]."""

    def select_add_rms_norm(
        self, x_TE: Tensor, residual_TE: Tensor, index_R: Tensor, weight: Tensor, eps: float
    ) -> Tensor:
        """rms_norm(x + residual) of these rows, those that sample; [R, E]. index_R: int64.

        A row may be there more than once.
        """

    def select(self, x_TE: Tensor, index_R: Tensor) -> Tensor:
        """These rows, those that sample; [R, E]. index_R: as above."""

    def add(self, x_TE: Tensor, residual_TE: Tensor) -> Tensor:
        """x + residual: what a stage of layers hands to the next one."""

    def all_reduce(self, x_TE: Tensor, group: RankGroup, bias_E: Tensor | None = None) -> Tensor:
        """The sum of x over ranks, rounded to its dtype, and then plus the bias if there is one.

        The same bits on every rank; x may be written over.
        """

    def capture(self, compute: Replay, max_tokens: int, max_samples: int) -> Replay | None:
        """`compute` as a whole that runs without Python, or None if this backend cannot.

        compute calls `begin_step` first, and then nothing but this backend's kernels on its
        result and views of it; here it runs once, on inputs that it may only hand on, and hidden
        states of max_tokens rows without meaning.
        """
