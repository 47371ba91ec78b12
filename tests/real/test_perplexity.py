"""Perplexity of a fixed text: beside llama.cpp's for the same file, and beside our own in bfloat16.

Both are means over the same 1,530 tokens, so limits are not about the text: they are what rounding
costs. llama.cpp rounds a linear layer's inputs to eight bits, as we do unless told otherwise.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable

import pytest

from tests.real.checkpoints import MARKS, MODELS
from tests.real.llama_cpp import FILE, TEXT_FILE
from tests.real.runs import Run

pytestmark = MARKS
BESIDE_LLAMA_CPP = {
    "as it is": (-0.017, 0.017),
    "int8 KV": (-0.012, 0.012),
    "int8": (-0.012, 0.012),
    "int4": (-0.367, 0.0),
}
"""Range of the ratio, less one. Set after measuring both models once, with AVX2: the larger
difference, a quarter more, and 0.005 for the rounding of other instruction sets. int4 must not be
worse than Q4_0, which has no minima: on weights that had been rounded to four or five bits before,
it costs much, and ours less (11.7 beside 14.1, and 14.1 beside 19.9)."""
COST = {"as it is": 0.012, "int8 KV": 0.015, "int8": 0.017, "int4": 0.107}
"""Limit of the ratio to our bfloat16, less one, by the same rule; the larger costs were 0.5 %,
0.7 %, 0.9 % and 8 %. To be derived anew when quantization changes."""


@pytest.mark.parametrize("way", BESIDE_LLAMA_CPP)
def test_perplexity_is_llama_cpps(
    run_of: Callable[[str], Run],
    model_name: str,
    record_property: Callable[[str, object], None],
    way: str,
) -> None:
    recorded = json.loads(FILE.read_text())
    assert recorded["text_sha256"] == hashlib.sha256(TEXT_FILE.read_bytes()).hexdigest()
    assert recorded[model_name]["sha256"] == MODELS[model_name].sha256
    theirs = recorded[model_name]["perplexity"][way]
    ours = run_of(way).perplexity
    record_property("perplexity", f"{ours:.4f}, llama.cpp's {theirs:.4f}")
    least, most = BESIDE_LLAMA_CPP[way]
    assert least < ours / theirs - 1 < most


@pytest.mark.parametrize("way", COST)
def test_quantization_costs_little_perplexity(
    run_of: Callable[[str], Run], record_property: Callable[[str, object], None], way: str
) -> None:
    exact, quantized = run_of("bfloat16").perplexity, run_of(way).perplexity
    record_property("perplexity", f"{quantized:.4f}, in bfloat16 {exact:.4f}")
    assert -COST[way] < quantized / exact - 1 < COST[way]


def test_bfloat16_costs_no_perplexity(
    run_of: Callable[[str], Run], record_property: Callable[[str, object], None]
) -> None:
    exact, rounded = run_of("float32").perplexity, run_of("bfloat16").perplexity
    record_property("perplexity", f"{rounded:.4f}, in float32 {exact:.4f}")
    assert abs(rounded / exact - 1) < 0.005
