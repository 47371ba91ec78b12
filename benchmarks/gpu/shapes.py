"""The models that are measured, as shapes, and the least time that steps of them can take.

A decode step reads all weights and the KV of its contexts, a prompt is multiplied through; the
limits are those at measured rates of copying and of bfloat16 GEMM. Norms, rotations, sampling and
all of the host's work count as nothing. Nothing has learned weights: only shapes decide speed.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from benchmarks.gpu.results import Results, Session
from benchmarks.models import SHAPES, ModelShape
from benchmarks.workloads import BenchmarkRequest

_BYTES: Final = 2  # bfloat16


@dataclass(frozen=True, slots=True)
class Rates:
    """Bytes copied per second, read and written ones counted; FLOP per second of bfloat16 GEMM."""

    copy: float
    gemm: float


ASSUMED_RATES: Final = Rates(copy=4.3e12, gemm=790e12)
"""Of an H200, as measured by copies of 8.6 GB and products of 8192 x 8192 matrices."""


@dataclass(frozen=True, slots=True)
class Model:
    """A Qwen3 by its sizes. tied: the head is the embedding."""

    name: str
    shape: ModelShape
    tied: bool

    @property
    def num_body(self) -> int:
        """Parameters of the layers' matrices."""
        shape = self.shape
        num_heads = 2 * (shape.num_attention_heads + shape.num_key_value_heads)
        attention = shape.hidden_size * num_heads * shape.head_dim
        mlp = 3 * shape.hidden_size * shape.intermediate_size
        return shape.num_hidden_layers * (attention + mlp)

    @property
    def num_head(self) -> int:
        """Parameters of the head."""
        return self.shape.vocab_size * self.shape.hidden_size

    @property
    def kv_bytes_per_token(self) -> int:
        """K and V of a token, in all layers."""
        shape = self.shape
        return 2 * _BYTES * shape.num_key_value_heads * shape.head_dim * shape.num_hidden_layers

    def decode_step_s(
        self,
        num_rows: int,
        num_context: float,
        rates: Rates,
        weight_bytes: int = _BYTES,
        kv_bytes: int = _BYTES,
    ) -> float:
        """Least time of a step of so many rows, with so many tokens in all of their contexts.

        weight_bytes, kv_bytes: of one value.
        """
        num_weights = self.num_body + self.num_head
        weights_s = max(
            weight_bytes * num_weights / rates.copy, 2 * num_weights * num_rows / rates.gemm
        )
        return weights_s + num_context * self.kv_bytes_per_token * kv_bytes / _BYTES / rates.copy

    def prefill_s(self, lengths: Sequence[int], rates: Rates) -> float:
        """Least time of prompts; of the head's work only what sampling needs."""
        shape = self.shape
        per_pair = 4 * shape.num_attention_heads * shape.head_dim * shape.num_hidden_layers
        flops = sum(2 * self.num_body * n + per_pair * n * n / 2 for n in lengths)
        return float(flops / rates.gemm)

    def workload_s(self, requests: Sequence[BenchmarkRequest], rates: Rates) -> float:
        """Least time of requests that all run from the start."""
        sizes = [(len(r.prompt_token_ids), r.num_output_tokens) for r in requests]
        seconds = self.prefill_s([num_prompt for num_prompt, _ in sizes], rates)
        for step in range(1, max(num_output for _, num_output in sizes)):
            contexts = [prompt + step for prompt, output in sizes if output > step]
            seconds += self.decode_step_s(len(contexts), sum(contexts), rates)
        return seconds

    def write_folder(self, parent: Path) -> Path:
        """A folder with config.json, and no weights."""
        folder = parent / self.name
        folder.mkdir(parents=True, exist_ok=True)
        # Both names of the dtype: older and newer transformers.
        own = {"tie_word_embeddings": self.tied, "dtype": "bfloat16", "eos_token_id": 1}
        (folder / "config.json").write_text(json.dumps(self.shape.config() | own, indent=1) + "\n")
        return folder


_BILLION_8: Final = ModelShape(
    hidden_size=4096,
    num_hidden_layers=36,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    intermediate_size=12288,
    vocab_size=151936,
    max_position_embeddings=40960,
)
"""Qwen3-8B (Qwen3 technical report, 2025)."""
_TINY: Final = ModelShape(
    hidden_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    intermediate_size=128,
    vocab_size=512,
    max_position_embeddings=1024,
)
MODELS: Final = (
    Model("qwen3-0.6b", SHAPES["qwen3-0.6b"], tied=True),
    Model("qwen3-8b", _BILLION_8, tied=False),
)
TINY_MODELS: Final = (
    Model("tiny", _TINY, tied=True),
    Model("tiny-untied", replace(_TINY, hidden_size=128), tied=False),
)


def models(session: Session) -> tuple[Model, Model]:
    """Those to measure: a small one and a large one."""
    return TINY_MODELS if session.small else MODELS


def rates(results: Results) -> Rates:
    """What `env` measured, or an H200's where it did not."""
    found = results.records.figures
    if not results.session.on_gpu or not {"env/copy", "env/gemm"} <= found.keys():
        return ASSUMED_RATES
    copy, gemm = found["env/copy"]["gb_per_s"], found["env/gemm"]["tflop_per_s"]
    return Rates(copy["median"] * 1e9, gemm["median"] * 1e12)
