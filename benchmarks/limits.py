"""What a machine allows: its measured rates, and the least time that a workload takes at them.

A step reads every weight once and the KV cache of its requests, and multiplies: whichever takes
longer is its limit. Weights and KV count as bfloat16, so an engine with smaller ones can exceed
the limit. Norms, rotations, sampling and all bookkeeping count as nothing.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

import torch
from models import ModelShape
from workloads import BenchmarkRequest

_BYTES_PER_VALUE = 2
_GEMM_ROWS = 1024
_GEMM_SIZE = 2048
_NUM_GEMMS = 5


@dataclass(frozen=True, slots=True)
class Rates:
    """What the machine did at its best. Reads of memory, and the faster of two kinds of GEMM."""

    read_gb_per_s: float
    gemm_gflop_per_s: float


def read_shape(folder: Path) -> ModelShape:
    """The sizes of a Qwen3 folder with tied embeddings."""
    config = json.loads((folder / "config.json").read_text())
    return ModelShape(**{name: config[name] for name in ModelShape.__dataclass_fields__})


def measure_gemm() -> dict[str, float]:
    """GFLOP/s of torch's GEMM at 1024 rows by dtype, with all of torch's threads."""
    rates = {}
    for dtype in (torch.bfloat16, torch.float32):
        rows = torch.ones(_GEMM_ROWS, _GEMM_SIZE, dtype=dtype)
        weights = torch.ones(_GEMM_SIZE, _GEMM_SIZE, dtype=dtype)
        torch.nn.functional.linear(rows, weights)  # packs, touches memory
        best_s = min(_gemm_s(rows, weights) for _ in range(_NUM_GEMMS))
        rates[str(dtype).removeprefix("torch.")] = (
            2 * _GEMM_ROWS * _GEMM_SIZE * _GEMM_SIZE / best_s / 1e9
        )
    return rates


def _gemm_s(rows: torch.Tensor, weights: torch.Tensor) -> float:
    start_s = time.perf_counter()
    torch.nn.functional.linear(rows, weights)
    return time.perf_counter() - start_s


def least_time_s(shape: ModelShape, requests: Sequence[BenchmarkRequest], rates: Rates) -> float:
    """Seconds that a workload takes at these rates: its prompts, then steps of all that decode.

    A prefix that all prompts share is computed once.
    """
    prompts = [request.prompt_token_ids for request in requests]
    num_shared = _num_shared(prompts) if len(prompts) > 1 else 0
    flops = _prefill_flops(shape, num_shared, 0)
    for prompt in prompts:
        flops += _prefill_flops(shape, len(prompt) - num_shared, num_shared)
    flops += 2 * _head_size(shape) * len(prompts)
    seconds = flops / (rates.gemm_gflop_per_s * 1e9)
    for step in range(1, max(request.num_output_tokens for request in requests)):
        running = [request for request in requests if request.num_output_tokens > step]
        num_context = sum(len(request.prompt_token_ids) + step for request in running)
        seconds += _decode_step_s(shape, len(running), num_context, rates)
    return seconds


def _num_shared(prompts: Sequence[Sequence[int]]) -> int:
    """Tokens at the start that all prompts have in common."""
    columns = zip(*prompts, strict=False)  # to the end of the shortest
    return sum(1 for _ in takewhile(lambda column: len(set(column)) == 1, columns))


def _decode_step_s(shape: ModelShape, num_rows: int, num_context: int, rates: Rates) -> float:
    """num_context: tokens in the KV cache of all rows together."""
    num_weights = _layers_size(shape) + _head_size(shape)
    num_bytes = _BYTES_PER_VALUE * (num_weights + _kv_values_per_token(shape) * num_context)
    flops = 2 * num_weights * num_rows + _attention_flops(shape, num_context)
    return max(num_bytes / (rates.read_gb_per_s * 1e9), flops / (rates.gemm_gflop_per_s * 1e9))


def _prefill_flops(shape: ModelShape, num_tokens: int, num_cached: int) -> float:
    """Causal: a token attends to the cached ones and to half of the new ones on average."""
    num_pairs = num_tokens * (num_cached + num_tokens / 2)
    return 2 * _layers_size(shape) * num_tokens + _attention_flops(shape, num_pairs)


def _attention_flops(shape: ModelShape, num_pairs: float) -> float:
    """num_pairs: of a query and a key, in one layer."""
    q_size = shape.num_attention_heads * shape.head_dim
    return 4 * q_size * shape.num_hidden_layers * num_pairs


def _kv_values_per_token(shape: ModelShape) -> int:
    return 2 * shape.num_key_value_heads * shape.head_dim * shape.num_hidden_layers


def _layers_size(shape: ModelShape) -> int:
    """Weights of all layers' matrices."""
    return sum(
        size[0] * size[1]
        for name, size in shape.tensor_shapes()
        if len(size) == 2 and "embed_tokens" not in name
    )


def _head_size(shape: ModelShape) -> int:
    return shape.vocab_size * shape.hidden_size
