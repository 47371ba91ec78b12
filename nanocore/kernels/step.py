"""The interface's kernels before, between and after layers, and a step as a whole.

Tables of a device beside the host hold the tokens and the KV blocks of all rows, and are changed in
the order of the steps (`nanocore.worker.device.step_memory` owns them). Shape suffixes: see
`interface`; further, W appended blocks.
"""

from __future__ import annotations

import ctypes
from typing import Literal, Protocol

import msgspec
from torch import Tensor

from nanocore.kernels.attention import AttentionMetadata
from nanocore.kernels.linear_weight import TokenEmbedding

GraphSupport = Literal["never", "decodes", "always"]
"""Steps that a graph can be captured of: none, those with nothing but decodes, or all."""


class StepRows(msgspec.Struct, frozen=True):
    """Places of a step's tokens and blocks in the tables.

    token_table: int32 [rows, max_model_len + 1]. block_table: int32 [rows, M], of blocks of
    block_size tokens. rows_T, positions_T: int64, the place of each token in the token table.
    rows_B: int64, the row of each sequence; seq_lens_B: see `AttentionMetadata`. block_rows_W,
    block_columns_W: int64, and block_ids_W: int32, blocks that rows got for this step, theirs or
    others. Places that are there twice, as padding is, have equal ids.

    Its methods are the reference for kernels that do it in one launch.
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

    def __call__(
        self, token_ids_T: Tensor, metadata: AttentionMetadata, sample_index_R: Tensor
    ) -> Tensor:
        """Run on a step's inputs; the result is valid until the next call."""


class StepKernels(Protocol):
    """What is neither a product nor attention nor sampling: norms, sums, graphs."""

    graph_support: GraphSupport

    def begin_step(
        self, rows: StepRows, embedding: TokenEmbedding | None
    ) -> tuple[Tensor, Tensor | None]:
        """All that a step on a device beside the host needs before its layers.

        The blocks that rows got are written to the block table. Returns the table of the step's
        sequences, see `AttentionMetadata`, and the hidden states of its tokens if there is an
        embedding.
        """

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

    def add(self, x_TE: Tensor, residual_TE: Tensor) -> Tensor:
        """x + residual: what a stage of layers hands to the next one."""

    def all_reduce(self, x_TE: Tensor, group: RankGroup, bias_E: Tensor | None = None) -> Tensor:
        """The sum of x over ranks, rounded to its dtype, and then plus the bias if there is one.

        The same bits on every rank; x may be written over.
        """

    def capture(self, compute: Replay, max_tokens: int, max_samples: int) -> Replay | None:
        """`compute` as a whole that runs without Python, or None if this backend cannot.

        compute calls nothing but this backend's kernels on its operands and views of them; here it
        runs once on operands of max_tokens rows, without meaning.
        """
