"""The least times of steps and workloads: bytes over the rate of copies, FLOP over that of GEMM."""

from __future__ import annotations

import pytest

from benchmarks.gpu.shapes import CARDS, MODELS, assumed_rates, rates_of
from benchmarks.workloads import nano_vllm_workload

SMALL, LARGE = MODELS
H200 = CARDS["H200"]
BY_NAME = {model.name: model for model in MODELS}


def test_sizes_are_those_of_the_models() -> None:
    assert (SMALL.num_body, SMALL.num_head) == (440_401_920, 155_582_464)
    assert round(LARGE.num_body / 1e9, 3) == 6.946
    assert round(LARGE.num_head / 1e9, 3) == 0.622
    assert (SMALL.kv_bytes_per_token, LARGE.kv_bytes_per_token) == (112 * 1024, 144 * 1024)


@pytest.mark.parametrize(
    ("model", "batch", "context", "milliseconds"),
    [
        ("qwen3-0.6b", 1, 128, 0.281),
        ("qwen3-0.6b", 1, 1024, 0.305),
        ("qwen3-0.6b", 32, 1024, 1.151),
        ("qwen3-0.6b", 256, 128, 1.26),
        ("qwen3-0.6b", 256, 1024, 7.38),
        ("qwen3-0.6b", 256, 4096, 28.4),
        ("qwen3-8b", 1, 1024, 3.56),
        ("qwen3-8b", 32, 4096, 8.02),
        ("qwen3-8b", 256, 128, 6.03),
    ],
)
def test_a_decode_step_reads_weights_and_kv(
    model: str, batch: int, context: int, milliseconds: float
) -> None:
    least_s = BY_NAME[model].decode_step_s(batch, batch * context, H200)
    assert 1e3 * least_s == pytest.approx(milliseconds, rel=0.005)


def test_weights_and_caches_of_a_byte_are_read_in_half_the_time() -> None:
    plain, weights, cache = (
        LARGE.decode_step_s(32, 32 * 1024, H200, weight_bytes, kv_bytes)
        for weight_bytes, kv_bytes in ((2, 2), (1, 2), (2, 1))
    )
    assert (plain - weights) + (plain - cache) == pytest.approx(plain / 2)


@pytest.mark.parametrize(
    ("model", "length", "tokens_per_s"),
    [("qwen3-0.6b", 1024, 791e3), ("qwen3-0.6b", 4096, 585e3), ("qwen3-8b", 1024, 55.7e3),
     ("qwen3-8b", 8192, 48.4e3)],
)  # fmt: skip
def test_prompts_are_multiplied_through(model: str, length: int, tokens_per_s: float) -> None:
    least_s = BY_NAME[model].prefill_s([length], H200)
    assert length / least_s == pytest.approx(tokens_per_s, rel=0.005)


@pytest.mark.parametrize(("model", "tokens_per_s"), [("qwen3-0.6b", 36_200), ("qwen3-8b", 12_700)])
def test_the_workload_is_nano_vllms_and_so_is_its_limit(model: str, tokens_per_s: float) -> None:
    requests = nano_vllm_workload(BY_NAME[model].shape.vocab_size)
    assert sum(len(request.prompt_token_ids) for request in requests) == 142_827
    num_outputs = sum(request.num_output_tokens for request in requests)
    assert num_outputs == 133_966
    least_s = BY_NAME[model].workload_s(requests, H200)
    assert num_outputs / least_s == pytest.approx(tokens_per_s, rel=0.005)


def test_repetitions_differ_in_prompts_and_agree_in_lengths() -> None:
    drawn = [nano_vllm_workload(1000, repetition) for repetition in (-1, 0, 1)]
    assert len({requests[0].prompt_token_ids for requests in drawn}) == 3
    sizes = [[(len(r.prompt_token_ids), r.num_output_tokens) for r in found] for found in drawn]
    assert sizes[0] == sizes[1] == sizes[2]


def test_limits_of_an_h100_are_those_that_its_goals_come_from() -> None:
    """In ms; the day's measured rates come before those of the card's name."""
    rates = assumed_rates("NVIDIA H100 80GB HBM3")
    found = [1e3 * SMALL.decode_step_s(rows, rows * 1024, rates) for rows in (1, 32, 256)]
    assert found == pytest.approx([0.436, 1.65, 10.4], rel=0.02)
    assert assumed_rates("NVIDIA H200") == CARDS["H200"]
    measured = {"env/copy": {"gb_per_s": {"median": 2400.0}},
                "env/gemm": {"tflop_per_s": {"median": 700.0}}}  # fmt: skip
    assert rates_of(measured, "NVIDIA H100 80GB HBM3") == CARDS["H100"]
    measured["env/read"] = {"gb_per_s": {"median": 3100.0}}
    assert rates_of(measured, "NVIDIA H100 80GB HBM3").bytes == 3.1e12
    assert rates_of(measured, "cpu") == CARDS["H100"]
