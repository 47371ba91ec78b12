"""The steps that take most memory, to be run once before the KV cache is sized.

All their KV blocks are the same one: what is computed makes no sense, and takes the room it would.
"""

from __future__ import annotations

from typing import Final

import msgspec
import numpy as np
import torch

from nanocore.kernels.kv_quantization import KVCacheFormat
from nanocore.kernels.logit_edits import TokenLists, TokenMask
from nanocore.kernels.step_rows import TokenPlaces
from nanocore.protocol.fields import MAX_STOP_TOKEN_IDS
from nanocore.protocol.sampling import EngineSamplingParams
from nanocore.worker.model_runner import ModelRunner
from nanocore.worker.plan import NewRow, SchedulerOutput, TokenMasks
from nanocore.worker.rank_messages import MAX_PROMPT_LOGPROBS, WorkerConfig
from nanocore.worker.sampling.columns import RowColumns, SamplingMetadata, costliest_sampling
from nanocore.worker.sampling.sampler import TokenSampler

NUM_PROFILED_GRAPHS: Final = 2
"""The largest ones, in whose memory the others live; of what each takes beside it, a sample."""


def run_largest_steps(runner: ModelRunner, kv_format: KVCacheFormat, config: WorkerConfig) -> None:
    """Run a step in which every row samples, as expensively as any, and a long context's end, of
    which every token's logits are looked at.

    The model's KV cache is gone afterwards, and the persistent batch is to be allocated anew. The
    captured graphs stay until then.
    """
    max_len = config.max_model_len
    num_tokens = min(config.max_num_batched_tokens, max_len - 1)
    runner.allocate(kv_format, 1, config.block_size, config.max_num_seqs, max_len)
    runner.capture(config.max_num_batched_tokens, NUM_PROFILED_GRAPHS)
    num_rows, vocab_size = config.max_num_seqs, runner.config.vocab_size
    num_logprobs = vocab_size if config.max_logprobs == -1 else config.max_logprobs
    per_row = max(1, min(config.max_num_batched_tokens // num_rows, max_len - 1))
    sampling = msgspec.structs.replace(costliest_sampling(vocab_size), logprobs=num_logprobs)
    rows = [_row(row, per_row, per_row, config.block_size, sampling) for row in range(num_rows)]
    _run_with_masks(runner, _plan(rows, [], per_row))
    if runner.sampler is not None and runner.model.head is not None:
        _sample(runner, runner.sampler, runner.model.head.num_tokens, rows)
    num_tokens = min(num_tokens, max(1, MAX_PROMPT_LOGPROBS // (1 + num_logprobs)))
    last = _row(0, max_len - 1, num_tokens, config.block_size, sampling)
    rows = [_with_prompt_logprobs(last, num_logprobs)]
    runner.execute(_plan(rows, list(range(num_rows)), num_tokens))
    runner.release_kv_memory()


def _run_with_masks(runner: ModelRunner, plan: SchedulerOutput) -> None:
    pending = runner.begin(msgspec.structs.replace(plan, awaits_masks=True))
    if pending.awaits_masks:  # here the model ends
        num_rows, num_words = len(plan.added), -(-runner.config.vocab_size // 32)
        words = np.full(num_rows * num_words, -1, "<i4").tobytes()
        pending.sample(TokenMasks(step=plan.step, rows=plan.chunk_rows, words=words))
    pending.wait()


def _sample(runner: ModelRunner, sampler: TokenSampler, width: int, rows: list[NewRow]) -> None:
    """Sample as expensively as it gets: of equal logits no filter can leave any out.

    Then plain tokens by masks that allow none: beside rows that ask for more there are such.
    """
    columns = RowColumns(len(rows), sampler.vocab_size)
    for new in rows:
        columns.set_row(new)
    sampled, device = columns.of_rows(np.arange(len(rows))), runner.device
    rows_R = torch.arange(len(rows), device=device)
    positions_R = torch.tensor([new.num_prompt_tokens for new in rows], device=device)
    packed = sampled.packed
    assert packed is not None, "the costliest rows name tokens"
    metadata = SamplingMetadata(
        {name: tensor.to(device) for name, tensor in sampled.tensors.items()},
        TokenPlaces(runner.token_table, rows_R, positions_R),
        TokenLists.of(torch.from_numpy(packed.column).to(device), packed.sizes),
    )
    logits_RV = torch.zeros(len(rows), width, device=device)
    sampler.sample_processed(logits_RV, metadata)
    words_MW = torch.zeros(1, -(-sampler.vocab_size // 32), dtype=torch.int32, device=device)
    index_R = torch.zeros(len(rows), dtype=torch.int32, device=device)
    sampler.sample_plain(logits_RV, metadata.noise, mask=TokenMask(words_MW, index_R))


def _row(
    row: int, length: int, num_tokens: int, block_size: int, sampling: EngineSamplingParams
) -> NewRow:
    """A row of `length` tokens of which the last num_tokens are to be computed."""
    return NewRow(
        row=row,
        token_ids=np.zeros(length, "<i4").tobytes(),
        num_prompt_tokens=length,
        num_computed_tokens=length - num_tokens,
        block_ids=np.zeros(-(-length // block_size), "<i4").tobytes(),
        sampling=sampling,
        seed=0,
        stop_token_ids=[0] * MAX_STOP_TOKEN_IDS,
    )


def _with_prompt_logprobs(new: NewRow, number: int) -> NewRow:
    # Prompt log probabilities of computed tokens are known already.
    sampling = msgspec.structs.replace(new.sampling, prompt_logprobs=number)
    return msgspec.structs.replace(
        new, sampling=sampling, num_prompt_logprobs=new.num_computed_tokens
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
