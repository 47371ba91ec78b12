"""Plans of steps and their rows, said by what is not as usual."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from nanocore.protocol.sampling import EngineSamplingParams
from nanocore.worker.plan import NewRow, SchedulerOutput


def int32(numbers: Iterable[int]) -> bytes:
    return np.array([*numbers], "<i4").tobytes()


def make_row(
    row: int,
    prompt: Sequence[int],
    sampling: EngineSamplingParams,
    *,
    output: Sequence[int] = (),
    num_computed: int = 0,
    blocks: Iterable[int] = (),
    seed: int = 0,
    **more: Any,
) -> NewRow:
    return NewRow(
        row=row,
        token_ids=int32([*prompt, *output]),
        num_prompt_tokens=len(prompt),
        num_computed_tokens=num_computed,
        block_ids=int32(blocks),
        sampling=sampling,
        seed=seed,
        **more,
    )


def make_plan(
    added: Iterable[NewRow] = (),
    chunks: Mapping[int, int] | None = None,
    *,
    removed: Iterable[int] = (),
    step: int = 1,
    **more: Any,
) -> SchedulerOutput:
    """chunks: tokens of each row that does not take one; `num_tokens` has them all, if not told."""
    chunks = chunks or {}
    usual = {"block_rows": b"", "block_ids": b"", "num_tokens": sum(chunks.values())}
    columns = {"chunk_rows": int32(chunks), "chunk_counts": int32(chunks.values())}
    return SchedulerOutput(
        step=step, removed_rows=int32(removed), added=[*added], **columns, **usual | more
    )
