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
from typing import Any, Final

from benchmarks.gpu.session import Session, read_report
from benchmarks.models import SHAPES, ModelShape

_BYTES: Final = 2  # bfloat16


@dataclass(frozen=True, slots=True)
class Rates:
    """Bytes copied per second, read and written ones counted; FLOP per second of bfloat16 GEMM."""

    copy: float
    gemm: float
    measured: bool


ASSUMED_RATES: Final = Rates(copy=4.3e12, gemm=790e12, measured=False)
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
        q_size, kv_size = (
            n * shape.head_dim for n in (shape.num_attention_heads, shape.num_key_value_heads)
        )
        attention = shape.hidden_size * (2 * q_size + 2 * kv_size)
        return shape.num_hidden_layers * (
            attention + 3 * shape.hidden_size * shape.intermediate_size
        )

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
        num_kv_bytes = num_context * self.kv_bytes_per_token * kv_bytes / _BYTES
        return weights_s + num_kv_bytes / rates.copy

    def prefill_s(self, lengths: Sequence[int], rates: Rates) -> float:
        """Least time of prompts; of the head's work only what sampling needs."""
        shape = self.shape
        per_pair = 4 * shape.num_attention_heads * shape.head_dim * shape.num_hidden_layers
        flops = sum(2 * self.num_body * n + per_pair * n * n / 2 for n in lengths)
        return float(flops / rates.gemm)

    def workload_s(self, requests: Sequence[tuple[int, int]], rates: Rates) -> float:
        """Least time of requests (prompt and output tokens) that all run from the start."""
        seconds = self.prefill_s([num_prompt for num_prompt, _ in requests], rates)
        for step in range(1, max(num_output for _, num_output in requests)):
            contexts = [prompt + step for prompt, output in requests if output > step]
            seconds += self.decode_step_s(len(contexts), sum(contexts), rates)
        return seconds

    def write_folder(self, parent: Path) -> Path:
        """A folder with config.json, and no weights."""
        folder = parent / self.name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.config(), indent=1) + "\n")
        return folder

    def config(self) -> dict[str, Any]:
        """The contents of config.json. Both names of the dtype: older and newer transformers."""
        own = {"tie_word_embeddings": self.tied, "dtype": "bfloat16", "eos_token_id": 1}
        return self.shape.config() | own


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
MODELS: Final = {
    "qwen3-0.6b": Model("qwen3-0.6b", SHAPES["qwen3-0.6b"], tied=True),
    "qwen3-8b": Model("qwen3-8b", _BILLION_8, tied=False),
}
TINY_MODELS: Final = {
    "tiny": Model("tiny", _TINY, tied=True),
    "tiny-untied": Model("tiny-untied", replace(_TINY, hidden_size=128), tied=False),
}


def models(session: Session) -> dict[str, Model]:
    """Those to measure."""
    return TINY_MODELS if session.small else MODELS


def rates(session: Session) -> Rates:
    """What `ceilings` measured, or an H200's where it has not run in this folder."""
    report = read_report(session.out, "env")
    found = report.get("measurements", {})
    copy, gemm = found.get("copy"), found.get("gemm/8192")
    if not session.on_gpu or copy is None or gemm is None:
        return ASSUMED_RATES
    return Rates(copy["gb_per_s"]["median"] * 1e9, gemm["tflop_per_s"]["median"] * 1e12, True)
