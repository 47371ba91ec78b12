"""Attention's metadata of a step with chosen lengths, for benchmarks and tests of kernels."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from nanocore.kernels.attention import AttentionMetadata


def make_metadata(
    seqs: Sequence[tuple[int, int]], table_BM: Tensor, block_size: int, num_padding: int = 0
) -> AttentionMetadata:
    """A step on the CPU that stores each of its tokens in its sequence's blocks.

    seqs: (context length including this step, query tokens) of the table's rows, decodes first.
    num_padding: tokens at the end of the step that belong to nobody.
    """
    counts, lengths = [count for _, count in seqs], [length for length, _ in seqs]
    starts, num_decodes = [0, *accumulate(counts)], counts.count(1)
    positions = [torch.arange(length - count, length) for length, count in seqs]
    slots = [
        blocks_M[places // block_size].long() * block_size + places % block_size
        for blocks_M, places in zip(table_BM, positions, strict=True)
    ]
    zeros = torch.zeros(num_padding, dtype=torch.int64)
    return AttentionMetadata(
        num_decodes=num_decodes,
        query_start=starts,
        seq_lens=lengths,
        num_decodes_1=torch.tensor([num_decodes], dtype=torch.int32),
        query_start_A=torch.tensor(starts, dtype=torch.int32),
        seq_lens_B=torch.tensor(lengths, dtype=torch.int32),
        block_table_BM=table_BM,
        positions_T=torch.cat([*positions, zeros]),
        slot_mapping_T=torch.cat([*slots, zeros - 1]),
    )
