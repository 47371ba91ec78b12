"""What the benchmarks of quantized layers compute: bytes, divergences and exact answers."""

from __future__ import annotations

import importlib
import math

import pytest
import torch
from torch import nn

from nanocore.kernels.cpu.cpu_backend import CpuKernels
from nanocore.kernels.cpu.library import find_library

needs_kernels = pytest.mark.skipif(find_library() is None, reason="no compiled kernels")


def kernels(*, keeps_activations: bool = False) -> CpuKernels:
    library = find_library()
    assert library is not None
    return CpuKernels(library, keeps_activations=keeps_activations)


@needs_kernels
@pytest.mark.parametrize(("quantization", "bits"), [(None, 16), ("int8", 8), ("int4", 4.5)])
def test_weights_to_read_are_as_large_as_asked(quantization: str | None, bits: float) -> None:
    weight_reading = importlib.import_module("weight_reading")
    weights = weight_reading._weights(kernels(), (64, 128), 40_000, quantization)
    measured = weight_reading.measure(kernels(), weights, 2)
    of_each = 64 * 128 * bits / 8
    assert measured["bytes"] == pytest.approx(len(weights) * of_each, rel=0.05)
    assert measured["bytes"] >= 40_000 > measured["bytes"] - 1.1 * of_each
    assert len(measured["share"]["values"]) == 2
    assert weights[0].data.data_ptr() != weights[-1].data.data_ptr()


def test_divergence_is_the_mean_over_tokens() -> None:
    divergence = importlib.import_module("divergence")
    even, uneven = torch.zeros(1, 2), torch.tensor([[math.log(3.0), 0.0]])
    assert divergence.divergence([even, uneven], [even, uneven]) == 0
    expected = 0.5 * math.log(0.5 / 0.75) + 0.5 * math.log(0.5 / 0.25)
    found = divergence.divergence([even, even], [even, uneven])
    assert found == pytest.approx(expected / 2, rel=1e-6)


def test_an_answer_is_exact_if_every_token_is() -> None:
    divergence = importlib.import_module("divergence")
    logits = torch.tensor([[0.0, 1.0], [1.0, 0.0]])
    answers = [([5], [1, 0]), ([5], [1, 1])]
    assert divergence.exact([logits, logits], answers) == 0.5


@needs_kernels
def test_a_native_model_has_every_layer_quantized() -> None:
    divergence = importlib.import_module("divergence")
    torch.manual_seed(0)
    layers = {"embed": nn.Embedding(64, 32), "inner": nn.Linear(32, 64, bias=False)}
    model = nn.Sequential()
    for name, layer in (*layers.items(), ("lm_head", nn.Linear(64, 64, bias=False))):
        model.add_module(name, layer)
    token_ids = torch.arange(6).view(2, 3)
    errors = []
    for quantization in ("int8", "int4"):
        with torch.inference_mode():
            plain = model(token_ids)
            logits = divergence.native(model, quantization, keeps_activations=True)(token_ids)
        errors.append(float((logits - plain).norm() / plain.norm()))
    assert 1e-4 < errors[0] < 0.03 < errors[1] < 0.2
