"""A parameter that changes logits is declared, and that is all: every path then has it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.worker.added_parameters import MAX_TOKENS, PENALTIES, PROMPTS

Runs = dict[str, list[list[int]]]


@pytest.fixture(scope="module")
def runs(tiny_model: Path) -> Runs:
    """Tokens by request, of each way to run it. In a process of its own: declarations stay."""
    command = [sys.executable, "-m", "tests.worker.added_parameters", str(tiny_model)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def said_by_transformers(folder: Path, prompt: list[int], repetition: float, presence: float):
    from transformers import (
        LogitsProcessor,
        LogitsProcessorList,
        Qwen3ForCausalLM,
        RepetitionPenaltyLogitsProcessor,
    )

    class Presence(LogitsProcessor):
        def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
            said = input_ids[0, len(prompt) :].unique()
            scores[0, said] -= presence
            return scores

    model = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        output = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt)),
            do_sample=False,
            max_new_tokens=MAX_TOKENS,
            pad_token_id=0,
            eos_token_id=None,
            logits_processor=LogitsProcessorList(
                [RepetitionPenaltyLogitsProcessor(repetition), Presence()]
            ),
        )
    return output[0, len(prompt) :].tolist()


def test_rows_that_ask_get_what_transformers_says(runs: Runs, tiny_model: Path) -> None:
    expected = [
        said_by_transformers(tiny_model, prompt, *penalties)
        for prompt, penalties in zip(PROMPTS, PENALTIES, strict=True)
    ]
    assert runs["host"][: len(PROMPTS)] == expected


def test_a_row_beside_them_that_does_not_ask_keeps_its_tokens(runs: Runs, tiny_model: Path) -> None:
    expected = said_by_transformers(tiny_model, PROMPTS[0], 1.0, 0.0)
    assert runs["host"][3] == expected
    assert runs["host"][0] != expected, "the penalty changes nothing here"


def test_a_device_and_its_graphs_say_the_same(runs: Runs) -> None:
    assert runs["device"] == runs["host"]
    assert runs["graphs"] == runs["host"]
