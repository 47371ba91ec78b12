"""Scores of a real engine are those of transformers, in float32, however prompts are computed."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from nanocore.client import LLM, ContextLengthError, SamplingParams
from tests.tiny_models import MAX_MODEL_LEN, VOCAB_SIZE

pytestmark = pytest.mark.usefixtures("forked_launches")

Pair = tuple[list[int], list[int]]
TOLERANCE = 2e-4


@pytest.fixture(scope="module")
def llm(tiny_model: Path) -> Iterator[LLM]:
    """An engine that computes prompts in pieces."""
    with LLM(tiny_model, max_num_batched_tokens=64, max_num_seqs=8) as running:
        yield running


@pytest.fixture(scope="module")
def log_probabilities(tiny_model: Path) -> Tensor:
    """What transformers says of a text of 128 tokens, each given those before it: [127, V]."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    with torch.no_grad():
        return torch.log_softmax(model(torch.tensor([TEXT])).logits[0], dim=-1)


def draw(num_tokens: int) -> list[int]:
    rng = random.Random(num_tokens)
    return [rng.randrange(VOCAB_SIZE - 1) for _ in range(num_tokens)]


TEXT = draw(128)


def test_each_token_has_the_reference_s_log_probability(
    llm: LLM, log_probabilities: Tensor
) -> None:
    ends = [(1, 2), (1, 128), (16, 17), (63, 128), (64, 65), (100, 103), (127, 128)]
    pairs: list[tuple] = [(TEXT[:start], TEXT[start:end]) for start, end in ends]
    for (start, end), score in zip(ends, llm.score(pairs, use_tqdm=False), strict=True):
        rows = log_probabilities[start - 1 : end - 1]
        expected = [row[token].item() for row, token in zip(rows, TEXT[start:end], strict=True)]
        assert score.token_ids == TEXT[start:end]
        assert score.token_logprobs == pytest.approx(expected, abs=TOLERANCE)
        assert score.logprob == pytest.approx(sum(expected), abs=len(expected) * TOLERANCE)
        assert score.is_greedy is (rows.argmax(-1).tolist() == TEXT[start:end])


def test_what_the_model_says_itself_is_greedy_and_with_one_other_token_it_is_not(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True, detokenize=False)
    (output,) = llm.generate([TEXT[:20]], params, use_tqdm=False)
    said = output.outputs[0].token_ids
    others = [[*said[:i], (said[i] + 1) % VOCAB_SIZE, *said[i + 1 :]] for i in (0, 4, 8)]
    scores = llm.score([(TEXT[:20], ids) for ids in (said, *others)], use_tqdm=False)
    assert [score.is_greedy for score in scores] == [True, False, False, False]


def test_choices_of_one_token_share_their_context(llm: LLM) -> None:
    context = draw(100)
    llm.score([(context, [1])], use_tqdm=False)
    scores = llm.score([(context, [choice]) for choice in (2, 3, 4)], use_tqdm=False)
    assert [score.num_cached_tokens for score in scores] == [96, 96, 96], "whole blocks of 16"


def test_all_but_the_last_token_may_be_as_many_as_the_model_has(llm: LLM) -> None:
    context = draw(MAX_MODEL_LEN + 1)
    (score,) = llm.score([(context[:-1], [7])], use_tqdm=False)
    assert score.num_tokens == 1
    with pytest.raises(ContextLengthError, match=f"max_model_len={MAX_MODEL_LEN}"):
        llm.score([(context, [7])], use_tqdm=False)
