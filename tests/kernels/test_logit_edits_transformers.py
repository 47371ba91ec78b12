"""Edits of logits as transformers' processors make them, where it has one that means the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    PrefixConstrainedLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensLogitsProcessor,
)

from nanocore.kernels.interface import Kernels
from nanocore.kernels.select import select_kernels
from nanocore.kernels.torch.backend import TorchKernels
from nanocore.protocol.sampling import EngineSamplingParams
from tests.logit_edits_reference import EditedRow, edit

VOCAB_SIZE = 50
PROMPT = [1, 2, 3, 4, 2, 2, 9]
OUTPUT = [15, 16, 12, 15, 15, 16, 2]
STOPS = (7, 15)
BAD = [[10], [15, 16, 2], [15, 16, 2, 21], [16, 2, 5], [2, 30], [12, 31]]
"""Other sequences than the prompt's: a processor sees no end of it, and we do."""

Case = tuple[dict[str, Any], Callable[[], LogitsProcessor]]

CASES: dict[str, Case] = {
    "allowed": (
        {"allowed_token_ids": [2, 15, 30]},
        lambda: PrefixConstrainedLogitsProcessor(lambda *_: [2, 15, 30], 1),
    ),
    "all but some": (
        {"allowed_token_ids": [i for i in range(VOCAB_SIZE) if i not in (2, 3)]},
        lambda: SuppressTokensLogitsProcessor([2, 3], device="cpu"),
    ),
    "bias": (
        {"logit_bias": [(2, 1.5), (40, -100.0)]},
        lambda: SequenceBiasLogitsProcessor([[[2], 1.5], [[40], -100.0]]),
    ),
    "fewer than min_tokens": (
        {"min_tokens": 8},
        lambda: MinNewTokensLengthLogitsProcessor(len(PROMPT), 8, list(STOPS), device="cpu"),
    ),
    "min_tokens": (
        {"min_tokens": 7},
        lambda: MinNewTokensLengthLogitsProcessor(len(PROMPT), 7, list(STOPS), device="cpu"),
    ),
    "bad words": ({"bad_words_token_ids": BAD}, lambda: NoBadWordsLogitsProcessor(BAD)),
    "repetition": (
        {"repetition_penalty": 1.3},
        lambda: RepetitionPenaltyLogitsProcessor(1.3),
    ),
    "less than one": (
        {"repetition_penalty": 0.7},
        lambda: RepetitionPenaltyLogitsProcessor(0.7),
    ),
}


@pytest.fixture(scope="module", params=["torch", "native"])
def kernels(request: pytest.FixtureRequest) -> Kernels:
    if request.param == "torch":
        return TorchKernels()
    return select_kernels("cpu", torch.device("cpu"))


def check(kernels: Kernels, asked: dict[str, Any], processor: Any) -> None:
    for seed in range(5):
        logits_RV = 3 * torch.randn(1, VOCAB_SIZE, generator=torch.Generator().manual_seed(seed))
        row = EditedRow(PROMPT, OUTPUT, EngineSamplingParams(**asked), STOPS)
        expected_RV: Tensor = processor(torch.tensor([PROMPT + OUTPUT]), logits_RV.clone())
        np.testing.assert_array_equal(edit(kernels, logits_RV, [row]), expected_RV)


@pytest.mark.parametrize("case", CASES)
def test_each_edit_is_the_processor_of_its_name(kernels: Kernels, case: str) -> None:
    asked, processor = CASES[case]
    check(kernels, asked, processor())


def test_all_edits_are_the_processors_in_their_order(kernels: Kernels) -> None:
    names = ("all but some", "bias", "fewer than min_tokens", "bad words", "repetition")
    asked = {name: value for case in names for name, value in CASES[case][0].items()}
    check(kernels, asked, LogitsProcessorList([CASES[case][1]() for case in names]))
