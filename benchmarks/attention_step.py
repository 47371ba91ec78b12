"""A step of chosen lengths as kernels see it, for benchmarks and tests."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from nanocore.kernels.attention import AttentionMetadata
from nanocore.kernels.step import StepInputs, StepRows


def make_metadata(
    seqs: Sequence[tuple[int, int]],
    block_table: Tensor,
    block_size: int = 0,
    num_padding: int = 0,
    num_decodes: int | None = None,
    decode_tokens: int = 1,
    table_rows_B: Tensor | None = None,
) -> AttentionMetadata:
    """A step that stores each of its tokens in its sequence's blocks, on the table's device.

    seqs: (context length including this step, query tokens) of these rows of the table, or of all,
    decodes first.
    block_size: 0 stores nothing. num_padding: tokens at the end of the step that belong to nobody.
    num_decodes: None for those of one token. decode_tokens: see `AttentionMetadata`.
    """
    counts, lengths = [count for _, count in seqs], [length for length, _ in seqs]
    starts = [0, *accumulate(counts)]
    num_decodes = counts.count(1) if num_decodes is None else num_decodes
    device = block_table.device
    nowhere = torch.zeros(num_padding, dtype=torch.int64, device=device)
    positions = [torch.arange(length - count, length, device=device) for length, count in seqs]
    slots = [torch.full_like(places, -1) for places in positions]
    if block_size:
        table_BM = block_table if table_rows_B is None else block_table[table_rows_B]
        slots = [
            blocks_M[places // block_size].long() * block_size + places % block_size
            for blocks_M, places in zip(table_BM, positions, strict=True)
        ]

    def on_device(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    return AttentionMetadata(
        num_decodes=num_decodes,
        query_start=starts,
        seq_lens=lengths,
        num_decodes_1=on_device([num_decodes]),
        query_start_A=on_device(starts),
        seq_lens_B=on_device(lengths),
        block_table=block_table,
        positions_T=torch.cat([*positions, nowhere]),
        slot_mapping_T=torch.cat([*slots, nowhere - 1]),
        table_rows_B=table_rows_B,
        decode_tokens=decode_tokens,
    )


def make_inputs(
    token_ids_T: Tensor,
    metadata: AttentionMetadata | None = None,
    sample_index_R: Tensor | None = None,
) -> StepInputs:
    """Inputs of a step with these tokens, and no new blocks; without metadata it is a prompt."""
    if metadata is None:
        num_tokens = len(token_ids_T)
        metadata = make_metadata([(num_tokens, num_tokens)], torch.zeros(1, 1, dtype=torch.int32))
    num_seqs, counts = len(metadata.seq_lens), np.diff(metadata.query_start)
    rows_T = torch.full_like(token_ids_T, num_seqs)  # of padding
    rows_T[: metadata.query_start[-1]] = torch.from_numpy(np.repeat(np.arange(num_seqs), counts))
    positions_T = metadata.positions_T
    token_table = torch.zeros(num_seqs + 1, int(positions_T.max()) + 1, dtype=torch.int32)
    token_table[rows_T, positions_T] = token_ids_T.int()
    rows_B = metadata.table_rows_B
    rows = StepRows(
        token_table=token_table,
        block_tables=metadata.block_table,
        block_size=16,
        rows_T=rows_T,
        positions_T=positions_T,
        rows_B=torch.arange(num_seqs) if rows_B is None else rows_B,
        seq_lens_B=metadata.seq_lens_B,
    )
    return StepInputs(
        rows=rows,
        num_decodes=metadata.num_decodes,
        query_start=metadata.query_start,
        seq_lens=metadata.seq_lens,
        num_decodes_1=metadata.num_decodes_1,
        query_start_A=metadata.query_start_A,
        slots_GT=metadata.slot_mapping_T,
        sample_index_R=rows_T if sample_index_R is None else sample_index_R,
    )
