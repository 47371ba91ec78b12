"""The models that are measured, as shapes, and the least time that steps of them can take.

A decode step reads all weights and the KV of its contexts, a prompt is multiplied through; the
limits are those at measured rates of copying and of bfloat16 GEMM. Norms, rotations, sampling and
all of the host's work count as nothing. Nothing has learned weights: only shapes decide speed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from benchmarks.gpu.results import Results, Session
from benchmarks.models import SHAPES, ModelShape
from benchmarks.workloads import BenchmarkRequest

_BYTES: Final = 2  # bfloat16


def weight_bytes(form: str | None, itemsize: int = _BYTES) -> float:
    """Of a value that is stored so, with its share of scales. itemsize: of floats."""
    return {None: float(itemsize), "int4": 0.5 + 2 / 32}.get(form, 1.0)


@dataclass(frozen=True, slots=True)
class Rates:
    """Bytes per second, of a copy or of reading alone, whichever is more; a copy's are counted
    when they are read and when they are written. FLOP per second of bfloat16 GEMM."""

    bytes: float
    gemm: float


CARDS: Final = {
    "H100": Rates(bytes=3.0e12, gemm=798e12),
    "H200": Rates(bytes=4.3e12, gemm=790e12),
}
"""As measured: an H100 reads 3.0 to 3.1 TB/s and an H200 copies 4.3; random products of 8192."""


def assumed_rates(card: str) -> Rates:
    """Rates of a card by its name, of which CARDS has a part; an H100's if it is another one."""
    return next((found for name, found in CARDS.items() if name in card), CARDS["H100"])


@dataclass(frozen=True, slots=True)
class Model:
    """One of `SHAPES`, by its name."""

    name: str

    @property
    def shape(self) -> ModelShape:
        """Its sizes."""
        return SHAPES[self.name]

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
        weight_bytes: float = _BYTES,
        kv_bytes: int = _BYTES,
    ) -> float:
        """Least time of a step of so many rows, with so many tokens in all of their contexts.

        weight_bytes, kv_bytes: of one value.
        """
        num_weights = self.num_body + self.num_head
        weights_s = max(
            weight_bytes * num_weights / rates.bytes, 2 * num_weights * num_rows / rates.gemm
        )
        return weights_s + num_context * self.kv_bytes_per_token * kv_bytes / _BYTES / rates.bytes

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


MODELS: Final = Model("qwen3-0.6b"), Model("qwen3-8b")
TINY_MODELS: Final = Model("tiny"), Model("tiny-untied")


def models(session: Session) -> tuple[Model, Model]:
    """Those to measure: a small one and a large one."""
    return TINY_MODELS if session.small else MODELS


def rates(results: Results) -> Rates:
    """What `env` measured, or what the card's kind does where it did not."""
    records = results.records
    return rates_of(records.figures, records.head["device"]["name"])


def rates_of(figures: dict[str, Any], card: str) -> Rates:
    """Rates of the card that figures were measured on.

    A copy alone, of the first reports, says too little: an H100 copies 2.44 TB/s and reads 3.12.
    """
    if not {"env/read", "env/gemm"} <= figures.keys() or card == "cpu":
        return assumed_rates(card)
    moved = [figures[name]["gb_per_s"]["median"] for name in ("env/copy", "env/read")]
    return Rates(max(moved) * 1e9, figures["env/gemm"]["tflop_per_s"]["median"] * 1e12)
