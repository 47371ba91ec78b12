"""All that a step needs before its layers, in one launch: its block tables and its embeddings.

Three kinds of programs, one after the other in the grid. Some copy a piece of a sequence's row of
the block table; some write the blocks that rows got for this step to that table; some embed a piece
of a token. Nothing is ordered between programs, so a copy may have met the table before or after
the appended blocks: whoever copies a row looks for its blocks and writes them over the copy. Blocks
of rows that are not in the step are written too. Rows and tokens are independent of each other.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl
from msgspec.structs import replace

from nanocore.kernels.linear_weight import TokenEmbedding
from nanocore.kernels.step import BegunStep, StepRows
from nanocore.kernels.triton.grouped_packing import GroupedLinear
from nanocore.kernels.triton.grouped_rows import embed

BLOCK: Final = 1024
NUM_WARPS: Final = 4


@triton.jit
def _copy_row(
    seq, piece, block_table, block_table_out, rows_b, seq_lens, block_rows, block_columns,
    block_ids, num_appended, num_columns, BLOCK_SIZE: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """A piece of a sequence's block ids; 0 where the sequence has none."""
    row = tl.load(rows_b + seq)
    out_row = block_table_out + seq.to(tl.int64) * num_columns
    offsets = tl.arange(0, BLOCK)
    columns = piece * BLOCK + offsets
    num_blocks = tl.cdiv(tl.load(seq_lens + seq), BLOCK_SIZE)
    ids = tl.load(block_table + row * num_columns + columns, mask=columns < num_blocks, other=0)
    tl.store(out_row + columns, ids, mask=columns < num_columns)
    tl.debug_barrier()  # what follows is written over it, by other threads
    for start in range(0, num_appended, BLOCK):
        w = start + offsets
        is_block = w < num_appended
        places = tl.load(block_columns + w, mask=is_block, other=0)
        is_own = is_block & (tl.load(block_rows + w, mask=is_block, other=-1) == row)
        is_own &= places // BLOCK == piece
        appended = tl.load(block_ids + w, mask=is_own, other=0)
        tl.store(out_row + places, appended, mask=is_own)


@triton.jit
def _append_blocks(
    piece, block_table, block_rows, block_columns, block_ids, num_appended, num_columns,
    BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    w = piece * BLOCK + tl.arange(0, BLOCK)
    is_block = w < num_appended
    rows = tl.load(block_rows + w, mask=is_block, other=0)
    columns = tl.load(block_columns + w, mask=is_block, other=0)
    ids = tl.load(block_ids + w, mask=is_block, other=0)
    tl.store(block_table + rows * num_columns + columns, ids, mask=is_block)


@triton.jit
def _embed(
    token, piece, token_table, rows_t, positions_t, weight, scale, out, token_stride, first_token,
    num_tokens, factor, SIZE: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """Rounded to out's dtype after the scale and after the factor, as the reference is."""
    place = tl.load(rows_t + token) * token_stride + tl.load(positions_t + token)
    local = tl.load(token_table + place).to(tl.int64) - first_token
    has_token = (local >= 0) & (local < num_tokens)
    columns = piece * BLOCK + tl.arange(0, BLOCK)
    is_column = columns < SIZE
    x = tl.load(weight + local * SIZE + columns, mask=is_column & has_token)
    x = tl.where(has_token, x.to(tl.float32), 0.0)
    if scale is not None:
        x *= tl.load(scale + local, mask=has_token, other=0.0)
    dtype: tl.constexpr = out.dtype.element_ty
    x = (x.to(dtype).to(tl.float32) * factor).to(dtype)
    tl.store(out + token.to(tl.int64) * SIZE + columns, x, mask=is_column)


# Views of a step's fields begin anywhere, and a new alignment would be compiled anew.
_FIELDS: Final = [
    "rows_b", "seq_lens", "block_rows", "block_columns", "block_ids", "rows_t", "positions_t",
]  # fmt: skip


@triton.jit(
    do_not_specialize=["num_seqs", "num_appended", "first_token"],
    do_not_specialize_on_alignment=_FIELDS,
)
def begin_step_kernel(
    block_table, block_table_out, rows_b, seq_lens, block_rows, block_columns, block_ids,
    token_table, rows_t, positions_t, weight, scale, out,
    num_seqs, num_appended, num_columns, token_stride, first_token, num_tokens, factor,
    SIZE: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """Without a weight there are no programs that embed."""
    program = tl.program_id(0)
    row_pieces = tl.cdiv(num_columns, BLOCK)
    num_copies, num_appends = num_seqs * row_pieces, tl.cdiv(num_appended, BLOCK)
    if program < num_copies:
        _copy_row(
            program // row_pieces, program % row_pieces, block_table, block_table_out, rows_b,
            seq_lens, block_rows, block_columns, block_ids, num_appended, num_columns, BLOCK_SIZE,
            BLOCK,
        )  # fmt: skip
    elif program < num_copies + num_appends:
        _append_blocks(
            program - num_copies, block_table, block_rows, block_columns, block_ids, num_appended,
            num_columns, BLOCK,
        )  # fmt: skip
    elif weight is not None:
        index = program - num_copies - num_appends
        PIECES: tl.constexpr = (SIZE + BLOCK - 1) // BLOCK
        _embed(
            index // PIECES, index % PIECES, token_table, rows_t, positions_t, weight, scale, out,
            token_stride, first_token, num_tokens, factor, SIZE, BLOCK,
        )  # fmt: skip


def begin_step(rows: StepRows, embedding: TokenEmbedding | None) -> BegunStep:
    if embedding is not None and isinstance(embedding.weight, GroupedLinear):
        begun = begin_step(rows, None)
        return replace(begun, x_TE=embed(rows.token_ids(), embedding))
    tables, num_groups = rows.block_tables, rows.num_groups
    num_columns, token_stride = tables.shape[1], rows.token_table.shape[1]
    assert tables.is_contiguous()
    assert rows.token_table.is_contiguous()
    # Of several groups each sequence's rows are copied, one for each group.
    rows_B, seq_lens_B = rows.rows_B, rows.seq_lens_B
    if num_groups > 1:
        first_G = torch.arange(num_groups, device=tables.device) * (len(tables) // num_groups)
        rows_B = (first_G[:, None] + rows_B).flatten()
        seq_lens_B = seq_lens_B.repeat(num_groups)
    num_seqs, num_appended = len(rows_B), len(rows.block_rows_W)
    ids_BM = tables.new_empty(num_seqs, num_columns)
    num_programs = num_seqs * triton.cdiv(num_columns, BLOCK) + triton.cdiv(num_appended, BLOCK)
    weight = scale = x_TE = None
    size = first_token = num_tokens = 1
    factor = 1.0
    if embedding is not None:
        packed, first_token, factor = embedding.weight, embedding.first_token, embedding.factor
        weight, scale = packed.data, packed.scale_O
        assert weight.is_contiguous()
        num_tokens, size = packed.out_features, packed.in_features
        x_TE = torch.empty(len(rows.rows_T), size, dtype=embedding.dtype, device=weight.device)
        num_programs += len(rows.rows_T) * triton.cdiv(size, BLOCK)
    if num_programs:
        begin_step_kernel[(num_programs,)](
            tables, ids_BM, rows_B, seq_lens_B, rows.block_rows_W, rows.block_columns_W,
            rows.block_ids_W, rows.token_table, rows.rows_T,
            rows.positions_T, weight, scale, x_TE, num_seqs, num_appended, num_columns,
            token_stride, first_token, num_tokens, factor,
            SIZE=size, BLOCK_SIZE=rows.block_size, BLOCK=BLOCK, num_warps=NUM_WARPS,
        )  # fmt: skip
    return BegunStep(list(ids_BM.chunk(num_groups)), None, x_TE)
