"""The steps that take most memory, to be run once before the KV cache is sized.

All their KV blocks are the same one: what is computed makes no sense, and takes the room it would.
"""

from __future__ import annotations

import numpy as np
import torch

from nanocore.kernels.kv_quantization import KVCacheFormat
from nanocore.protocol.plan import NewRow, SchedulerOutput
from nanocore.protocol.sampling import EngineSamplingParams
from nanocore.protocol.worker import WorkerConfig
from nanocore.worker.model_runner import ModelRunner


def run_largest_steps(runner: ModelRunner, kv_format: KVCacheFormat, config: WorkerConfig) -> None:
    """Run a step in which every row samples, with filters, and one at the end of a long context.

    The model's KV cache and persistent batch are of one block afterwards, to be allocated anew.
    """
    max_len = config.max_model_len
    num_tokens = min(config.max_num_batched_tokens, max_len - 1)
    runner.allocate(
        kv_format, 1, config.block_size, config.max_num_seqs, max_len, config.max_num_batched_tokens
    )
    num_rows = config.max_num_seqs
    per_row = max(1, min(config.max_num_batched_tokens // num_rows, max_len - 1))
    rows = [_row(row, per_row, per_row, config.block_size) for row in range(num_rows)]
    runner.execute(_plan(rows, [], per_row))
    if runner.model.head is not None:  # equal logits: no filter can leave a token out
        logits_RV = torch.zeros(num_rows, runner.model.head.num_tokens, device=runner.device)
        runner.sample(logits_RV, np.arange(num_rows), np.full(num_rows, per_row))
    rows = [_row(0, max_len - 1, num_tokens, config.block_size)]
    runner.execute(_plan(rows, list(range(num_rows)), num_tokens))
    runner.kv_caches = []


def _row(row: int, length: int, num_tokens: int, block_size: int) -> NewRow:
    """A row of `length` tokens of which the last num_tokens are to be computed."""
    return NewRow(
        row=row,
        token_ids=np.zeros(length, "<i4").tobytes(),
        num_computed_tokens=length - num_tokens,
        block_ids=np.zeros(-(-length // block_size), "<i4").tobytes(),
        sampling=EngineSamplingParams(temperature=1.0, top_p=0.999),
        seed=0,
    )


def _plan(rows: list[NewRow], removed: list[int], num_tokens: int) -> SchedulerOutput:
    column = np.array([new.row for new in rows], "<i4")
    return SchedulerOutput(
        step=0,
        removed_rows=np.array(removed, "<i4").tobytes(),
        added=rows,
        block_rows=b"",
        block_ids=b"",
        chunk_rows=column.tobytes(),
        chunk_counts=np.full(len(rows), num_tokens, "<i4").tobytes(),
        num_tokens=num_tokens * len(rows),
    )
