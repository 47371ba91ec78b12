"""Checkpoints that public tools quantized say what their dequantized float32 models say."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from nanocore.kernels.grouped_weight import Float8Weight, GroupedWeight
from nanocore.protocol.errors import ConfigError
from nanocore.worker.loading.weights import Projection
from nanocore.worker.rank_messages import Quantization
from tests.campaign import in_campaign
from tests.worker.dequantized import dequantized
from tests.worker.running import Sample, run_script, stored_format, write_script

FOLDER = Path(__file__).parents[1] / "fixtures" / "checkpoints"
FIXTURES = sorted(path.parent.name for path in FOLDER.glob("*/config.json"))
CHARACTERS = "\n" + "".join(map(chr, range(32, 127)))
FACTORS = (3, 7, 17)
START, NUM_TOKENS = 40, 24
"""Characters that are given, of a table of 200 or more, and that are to be said."""
MIN_MARGIN = 8.0
"""How far ahead of the next the likeliest token is at least, in logits."""
MAX_DIFFERENCE = 0.6
"""Of logits, from rounding activations to eight bits, or to bfloat16; twice what is seen."""
MAX_EXACT_DIFFERENCE = 1e-4
"""Of logits, where weights are dequantized and all is float32; ten times what is seen."""
SLICES = (slice(0, 64), slice(64, 128), slice(32, 64), slice(0, 128))


@dataclass(frozen=True)
class Expected:
    """What the float32 model says after each prompt: tokens, and their logits [T, V]."""

    prompts: list[list[int]]
    outputs: list[list[int]]
    logits: list[Tensor]


def read_config(name: str) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((FOLDER / name / "config.json").read_text())
    found: dict[str, Any] = config["quantization_config"]
    return found


@cache
def meaning(name: str) -> dict[str, Tensor]:
    return dequantized(load_file(FOLDER / name / "model.safetensors"), read_config(name))


@cache
def expected(name: str) -> Expected:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = json.loads((FOLDER / name / "config.json").read_text())
    del config["quantization_config"]
    with torch.device("meta"):
        model = Qwen2ForCausalLM(Qwen2Config.from_dict(config))
    weights = {key: tensor.float() for key, tensor in meaning(name).items()}
    model = Qwen2ForCausalLM(Qwen2Config.from_dict(config | {"dtype": "float32"}))
    model.load_state_dict(weights)
    model.eval()
    prompts, outputs, logits = [], [], []
    for factor in FACTORS:
        table = "".join(f"{n} times {factor} is {n * factor}. " for n in range(1, 13))
        prompt = [CHARACTERS.index(character) for character in table[:START]]
        tokens = list(prompt)
        with torch.inference_mode():
            for _ in range(NUM_TOKENS):
                tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
            said = model(torch.tensor([tokens])).logits[0, START - 1 : -1]
        prompts.append(prompt)
        outputs.append(tokens[START:])
        logits.append(said)
    return Expected(prompts, outputs, logits)


def say(
    name: str,
    tp_size: int,
    backend: str,
    dtype: torch.dtype,
    quantization: Quantization | None = None,
    *,
    keeps_activations: bool = False,
) -> list[Sample]:
    reference = expected(name)
    script = write_script(reference.prompts, reference.outputs)
    return run_script(
        FOLDER / name, script, tp_size, dtype=dtype, backend=backend, quantization=quantization,
        keeps_activations=keeps_activations,
    )  # fmt: skip


def largest_difference(name: str, samples: list[Sample]) -> float:
    logits = expected(name).logits
    return max(
        float((sample.logits_V - logits[sample.request][sample.index]).abs().max())
        for sample in samples
    )


@pytest.mark.parametrize("name", FIXTURES)
def test_weights_are_what_the_format_defines(name: str) -> None:
    weight_format = stored_format(FOLDER / name)
    assert weight_format is not None
    tensors = load_file(FOLDER / name / "model.safetensors")
    num_quantized = 0
    for key, exact in meaning(name).items():
        module = key.removesuffix(".weight")
        if exact.ndim != 2:
            continue
        for rows in SLICES:
            columns = slice(0, exact.shape[1])
            stored = weight_format.projection(Projection(module, tuple(exact.shape), rows, columns))
            assert (stored is None) == (
                f"{module}.weight" in tensors and exact.dtype != torch.float32
            )
            if stored is None or rows.stop > len(exact):
                continue
            filled = {
                slot: tensors[f"{module}.{slot}"][place.index]
                for slot, place in stored.slots.items()
            }
            weight = stored.unpack(filled)
            assert isinstance(weight, GroupedWeight | Float8Weight)
            torch.testing.assert_close(weight.dequantize(), exact[rows], rtol=1e-6, atol=1e-7)
            num_quantized += 1
    assert num_quantized > 2 * 5 * 3


@pytest.mark.parametrize("name", FIXTURES)
def test_the_likeliest_token_is_far_ahead(name: str) -> None:
    best = torch.cat(expected(name).logits).topk(2).values
    assert float((best[:, 0] - best[:, 1]).min()) > MIN_MARGIN


@pytest.mark.parametrize("name", FIXTURES)
def test_dequantized_it_says_what_the_float32_model_says(name: str) -> None:
    samples = say(name, 1, "torch", torch.float32)
    assert largest_difference(name, samples) < MAX_EXACT_DIFFERENCE


@pytest.mark.parametrize(
    ("backend", "dtype"),
    [("cpu", torch.bfloat16), *in_campaign(("cpu", torch.float32), ("torch", torch.bfloat16))],
)
@pytest.mark.parametrize("name", FIXTURES)
def test_it_says_the_same_tokens_with_rounded_activations(
    name: str, backend: str, dtype: torch.dtype
) -> None:
    check_tokens(name, say(name, 1, backend, dtype))


@pytest.mark.parametrize("name", sorted({*FIXTURES} - {"gptq-v2-desc-act-g32"}))
def test_two_ranks_say_what_one_says(name: str) -> None:
    check_tokens(name, say(name, 2, "cpu", torch.float32))


@pytest.mark.parametrize("name", FIXTURES)
def test_with_activations_as_they_are_it_is_as_good_as_dequantized(name: str) -> None:
    samples = say(name, 1, "cpu", torch.float32, keeps_activations=True)
    is_rounded = "fp8" in name
    assert largest_difference(name, samples) < (0.1 if is_rounded else MAX_EXACT_DIFFERENCE)


@pytest.mark.parametrize("quantization", ["int8", *in_campaign("int4")])
def test_what_a_checkpoint_left_as_floats_can_be_quantized_at_load(
    quantization: Quantization,
) -> None:
    name = "awq-asym-g64"
    samples = say(name, 1, "cpu", torch.float32, quantization, keeps_activations=True)
    assert largest_difference(name, samples) > MAX_EXACT_DIFFERENCE  # the head was rounded
    check_tokens(name, samples)


def test_ranks_cannot_share_sorted_inputs() -> None:
    with pytest.raises(ConfigError, match="any order"):
        say("gptq-v2-desc-act-g32", 2, "cpu", torch.float32)


def check_tokens(name: str, samples: list[Sample]) -> None:
    outputs = expected(name).outputs
    assert len(samples) == len(outputs) * NUM_TOKENS
    assert all(s.token_id == outputs[s.request][s.index] for s in samples)
    assert largest_difference(name, samples) < MAX_DIFFERENCE
