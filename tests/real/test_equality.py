"""Weights, greedy tokens and log probabilities beside transformers, which reads the file itself.

Tolerances are measured, not chosen: a right implementation in a dtype differs from float64 by what
the dtype rounds away, and the reference in that dtype shows how much that is for the same tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from nanocore.worker.models import load_model_config
from tests.real.checkpoints import MARKS
from tests.real.reference import Reference
from tests.real.runs import Run
from tests.worker.gguf.test_gguf_models import weights

pytestmark = MARKS
SLACK = 2.0
"""Engines round at other places than transformers does, and as often, give or take."""


def test_weights_are_bit_for_bit_what_transformers_reads(path: Path, dequantized: Path) -> None:
    config = load_model_config(path)
    theirs = load_file(dequantized / "model.safetensors")
    ours = weights(path, config)
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        is_whole = getattr(config, "norms_are_whole", False) and name.endswith("norm.weight")
        assert torch.equal(tensor - 1 if is_whole else tensor, theirs[name]), name


@pytest.mark.parametrize("way", ["float32", "bfloat16"])
def test_greedy_tokens_and_log_probabilities_are_those_of_transformers(
    run_of: Callable[[str], Run],
    dequantized: Path,
    record_property: Callable[[str, object], None],
    way: str,
) -> None:
    said, candidates, _ = run_of(way)
    truth = Reference(dequantized, torch.float64).log_probabilities(said)
    rounded = Reference(dequantized, torch.float32, way == "bfloat16").log_probabilities(said)
    picks = [
        (i, k, token, logprob)
        for i, of_prompt in enumerate(candidates)
        for k, of_token in enumerate(of_prompt)
        for token, logprob in of_token.items()
    ]
    true = torch.tensor([truth[i][k, token].item() for i, k, token, _ in picks]).double()
    ours = torch.tensor([logprob for *_, logprob in picks]).double() - true
    theirs = torch.tensor([rounded[i][k, token].item() for i, k, token, _ in picks]) - true
    record_property("errors of log probabilities, ours", describe(ours))
    record_property("errors of log probabilities, of the dtype", describe(theirs))
    assert rms(ours) <= SLACK * rms(theirs)
    assert ours.abs().max() <= SLACK * theirs.abs().max()
    # The best of two log probabilities that are both off by that is one of a near tie.
    near = 2 * SLACK * theirs.abs().max()
    margins = [
        row.max() - row[token]
        for rows, (_, tokens) in zip(truth, said, strict=True)
        for row, token in zip(rows, tokens, strict=True)
    ]
    decided = [f"{margin:.3f}" for margin in map(float, margins) if margin]
    record_property("margins of near ties that were decided otherwise", decided)
    assert max(margins) <= near


def rms(errors: Tensor) -> float:
    return errors.square().mean().sqrt().item()


def describe(errors: Tensor) -> str:
    return f"rms {rms(errors):.1e}, max {errors.abs().max().item():.1e}"
