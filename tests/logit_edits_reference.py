"""Edits of logits, token by token in numpy's float32, and rows that ask for them at random."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nanocore.kernels.interface import Kernels
from nanocore.kernels.sampling import TokenPlaces
from nanocore.protocol.sampling import EngineSamplingParams
from nanocore.worker.plan import NewRow
from nanocore.worker.sampling.columns import RowColumns, SampledRows
from tests.sampling_reference import make_metadata
from tests.step_plans import make_row

F = np.float32


@dataclass(frozen=True)
class EditedRow:
    """A row that samples its next token. Filters, if there are any, come later."""

    prompt: list[int]
    output: list[int]
    sampling: EngineSamplingParams
    stop_token_ids: tuple[int, ...] = ()

    def new_row(self, row: int, seed: int = 0) -> NewRow:
        more = {"output": self.output, "stop_token_ids": list(self.stop_token_ids)}
        return make_row(row, self.prompt, self.sampling, seed=seed, **more)

    @np.errstate(invalid="ignore")
    def edited(self, logits_V: NDArray[np.float32]) -> NDArray[np.float32]:
        """What these logits become."""
        sampling, logits = self.sampling, logits_V.copy()
        if sampling.allowed_token_ids is not None:
            for token_id in set(range(len(logits))) - set(sampling.allowed_token_ids):
                logits[token_id] += F(-np.inf)
        for token_id, bias in sampling.logit_bias:
            logits[token_id] += F(bias)
        if len(self.output) < sampling.min_tokens:
            for token_id in self.stop_token_ids:
                logits[token_id] += F(-np.inf)
        for *before, last in sampling.bad_words_token_ids:
            if self.output[len(self.output) - len(before) :] == before:
                logits[last] += F(-np.inf)
        repetition = F(sampling.repetition_penalty)
        for token_id in {*self.prompt, *self.output} - {-1}:
            x = logits[token_id]
            logits[token_id] = x / repetition if x > 0 else x * repetition
        for token_id in set(self.output) - {-1}:
            count = F(self.output.count(token_id))
            logits[token_id] -= F(sampling.frequency_penalty) * count
            logits[token_id] -= F(sampling.presence_penalty)
        return logits


def sampled_rows(rows: list[EditedRow], vocab_size: int) -> SampledRows:
    """How these rows sample; their seeds are 0, 1, 2, ..."""
    columns = RowColumns(len(rows), vocab_size)
    for i, row in enumerate(rows):
        columns.set_row(row.new_row(i, seed=i))
    return columns.of_rows(np.arange(len(rows)))


def places_of(rows: list[EditedRow], max_model_len: int | None = None) -> TokenPlaces:
    """Where their next tokens go, in a table with other tokens behind theirs."""
    lengths = [len(row.prompt) + len(row.output) for row in rows]
    width = max(lengths) + 1 if max_model_len is None else max_model_len
    table = torch.zeros(len(rows), width, dtype=torch.int32)
    for i, row in enumerate(rows):
        table[i, : lengths[i]] = torch.tensor(row.prompt + row.output, dtype=torch.int32)
    return TokenPlaces(table, torch.arange(len(rows)), torch.tensor(lengths))


def edit(kernels: Kernels, logits_RV: Tensor, rows: list[EditedRow]) -> Tensor:
    """What the kernels make of these rows' logits, [R, V]."""
    edited_RV = logits_RV.clone()
    sampled = sampled_rows(rows, logits_RV.shape[1])
    edits = make_metadata(sampled, places_of(rows)).of_processed().edits
    if edits is None:
        return edited_RV
    index_P = torch.from_numpy(sampled.columns["processed_P"][: edits.lists.num_rows])
    of_rows_PV = edited_RV[index_P]
    kernels.edit_logits(of_rows_PV, edits)
    edited_RV[index_P] = of_rows_PV
    return edited_RV


def draw_row(rng: np.random.Generator, vocab_size: int, max_tokens: int = 40) -> EditedRow:
    """Of few different tokens, so that they come again. It asks for anything, or for nothing."""
    few = rng.integers(0, vocab_size, 6)

    def tokens(most: int, least: int = 0) -> list[int]:
        return rng.choice(few, rng.integers(least, most + 1)).tolist()

    prompt, output = tokens(max_tokens, 1), tokens(max_tokens)
    asks: dict[str, Any] = {
        "allowed_token_ids": tokens(5, 1) + rng.integers(0, vocab_size, 3).tolist(),
        "logit_bias": [(token_id, rng.normal() * 20) for token_id in sorted(set(tokens(6)))],
        "bad_words_token_ids": [
            output[len(output) - rng.integers(0, 4) :] + tokens(2, 1)
            for _ in range(rng.integers(1, 5))
        ],
        "min_tokens": int(rng.integers(1, 2 * max_tokens)),
        "repetition_penalty": rng.uniform(0.5, 2.0),
        "frequency_penalty": rng.uniform(-2.0, 2.0),
        "presence_penalty": rng.uniform(-2.0, 2.0),
    }
    share = rng.choice([0.0, 0.2, 0.6, 1.0])
    asked = {name: value for name, value in asks.items() if rng.random() < share}
    return EditedRow(prompt, output, EngineSamplingParams(**asked), tuple(tokens(4)))
