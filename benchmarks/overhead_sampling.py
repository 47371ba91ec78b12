"""What sampling costs a rank where some rows of a step use everything that a request may ask for.

From logits to tokens on the CPU with the native kernels, one step of NUM_ROWS rows: `plain`, a
temperature alone in every row; `some`, everything in NUM_FULL of them; `full`, everything in all.
Flat logits, so that filters have much to choose from. The three take turns, on the wall.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache
from typing import Final

import numpy as np
import torch
from torch import Tensor

from nanocore.kernels.select import select_kernels
from nanocore.kernels.step_rows import TokenPlaces
from nanocore.protocol.sampling import EngineSamplingParams
from nanocore.worker.communication.communicator import SingleRank
from nanocore.worker.plan import NewRow
from nanocore.worker.sampling.columns import RowColumns
from nanocore.worker.sampling.sampler import TokenSampler

NUM_ROWS: Final = 256
NUM_FULL: Final = 16
VOCAB_SIZE: Final = 32_768
PLAIN: Final = EngineSamplingParams(temperature=0.8)
EVERYTHING: Final = EngineSamplingParams(temperature=0.8, top_k=50, top_p=0.95, min_p=0.05)
_LOGIT_STD: Final = 0.05
_STEPS_PER_REPEAT: Final = 8


@cache
def sampling_us(repeats: int) -> dict[str, list[float]]:
    """A step of each of the three, mean over a few, once per repeat."""
    logits_RV = _LOGIT_STD * torch.randn(NUM_ROWS, VOCAB_SIZE)
    steps = {
        "plain": _make_step(logits_RV, 0),
        "some": _make_step(logits_RV, NUM_FULL),
        "full": _make_step(logits_RV, NUM_ROWS),
    }
    figures: dict[str, list[float]] = {name: [] for name in steps}
    position = 0
    with torch.inference_mode():
        for repeat in range(-1, repeats):  # the first one warms up
            spent_s = dict.fromkeys(steps, 0.0)
            for _ in range(_STEPS_PER_REPEAT):
                position += 1  # each step has noise of its own
                for name, step in steps.items():
                    start_s = time.perf_counter()
                    step(position)
                    spent_s[name] += time.perf_counter() - start_s
            if repeat >= 0:
                for name in steps:
                    figures[name].append(spent_s[name] * 1e6 / _STEPS_PER_REPEAT)
    return figures


def _make_step(logits_RV: Tensor, num_full: int) -> Callable[[int], Tensor]:
    """Samples a token of each row; the argument is where it will be."""
    num_rows, vocab_size = logits_RV.shape
    columns = RowColumns(num_rows, vocab_size)
    for row in range(num_rows):
        columns.set_row(
            NewRow(
                row=row,
                token_ids=b"",
                num_prompt_tokens=0,
                num_computed_tokens=0,
                block_ids=b"",
                sampling=EVERYTHING if row < num_full else PLAIN,
                seed=row,
            )
        )
    rows, rows_R = columns.of_rows(np.arange(num_rows)), torch.arange(num_rows)
    kernels = select_kernels("cpu", torch.device("cpu"))
    sampler = TokenSampler(0, vocab_size, SingleRank(), kernels)
    no_table = torch.zeros(0, 0, dtype=torch.int32)

    def step(position: int) -> Tensor:
        places = TokenPlaces(no_table, rows_R, torch.full_like(rows_R, position))
        return sampler.sample(logits_RV, rows, places)

    return step
