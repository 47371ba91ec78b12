"""Choosing tokens from logits: greedy, with noise, and among the likeliest."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.kernel_case import Draw, KernelCase, share_unequal
from benchmarks.gpu.session import Session
from benchmarks.gpu.shapes import models
from nanocore.kernels.backend import Filters, Kernels, Noise
from nanocore.kernels.torch_backend import TorchKernels

_REFERENCE = TorchKernels()


def sampling_cases(session: Session) -> Iterator[KernelCase]:
    """At the models' vocabulary."""
    vocab = next(iter(models(session).values())).shape.vocab_size
    for rows in (1, 3) if session.small else (1, 32, 256):
        yield from _plain(session, rows, vocab)
        yield from _filtered(session, rows, vocab)


def _make(session: Session, rows: int, vocab: int, number: int) -> tuple[Tensor, Noise]:
    draw = Draw(session.device, torch.float32, number)
    noise = Noise(
        temperature_R=torch.full((rows,), 0.6, device=session.device),
        seed_R=draw.integers(2**40, rows),
        position_R=draw.integers(4096, rows),
    )
    return draw.normal(rows, vocab, std=3.0), noise


def _plain(session: Session, rows: int, vocab: int) -> Iterator[KernelCase]:
    yield KernelCase(
        name=f"best_token/greedy/{rows}",
        num_bytes=4 * rows * vocab,
        flops=0,
        make=lambda number: _make(session, rows, vocab, number),
        run=lambda kernels, s: kernels.best_token(s[0], 0)[1],
        error=lambda s, out: share_unequal(out, s[0].argmax(-1)),
        others={"torch": lambda s: s[0].argmax(-1)},
    )

    def softmax_and_exponential(s: tuple[Tensor, Noise]) -> Tensor:
        """What engines without a kernel of their own do."""
        probabilities = torch.softmax(s[0] / s[1].temperature_R[:, None], -1)
        return (probabilities / torch.empty_like(probabilities).exponential_()).argmax(-1)

    yield KernelCase(
        name=f"best_token/noise/{rows}",
        num_bytes=4 * rows * vocab,
        flops=0,
        make=lambda number: _make(session, rows, vocab, number),
        run=lambda kernels, s: kernels.best_token(s[0], 0, s[1])[1],
        error=lambda s, out: share_unequal(out, _REFERENCE.best_token(s[0], 0, s[1])[1]),
        others={"torch softmax, exponential": softmax_and_exponential},
    )


def _filtered(session: Session, rows: int, vocab: int) -> Iterator[KernelCase]:
    kinds = {"top_k 50": (50, 1.0), "top_p 0.9": (vocab, 0.9), "both": (50, 0.9)}
    for kind, (top_k, top_p) in kinds.items():
        filters = Filters(
            top_k_R=torch.full((rows,), top_k, dtype=torch.int32, device=session.device),
            top_p_R=torch.full((rows,), top_p, device=session.device),
            min_p_R=torch.zeros(rows, device=session.device),
        )

        def run(kernels: Kernels, s: tuple[Tensor, Noise], filters: Filters = filters) -> Any:
            found = kernels.best_filtered_token(s[0], s[1], filters)
            return None if found is None else found[1]

        def error(s: tuple[Tensor, Noise], out: Any, k: int = top_k, p: float = top_p) -> float:
            """Against a sort in float64, noise added to what stays."""
            if out is None:
                return math.nan  # this backend has no such kernel
            kept = sorted_filter(s[0].double(), s[1].temperature_R.double(), k, p)
            return share_unequal(out, _REFERENCE.best_token(kept.float(), 0, s[1])[1])

        def by_sorting(s: tuple[Tensor, Noise], k: int = top_k, p: float = top_p) -> Tensor:
            kept = sorted_filter(s[0], s[1].temperature_R, k, p)
            probabilities = kept.softmax(-1)
            return (probabilities / torch.empty_like(probabilities).exponential_()).argmax(-1)

        yield KernelCase(
            name=f"best_filtered_token/{kind}/{rows}",
            num_bytes=4 * rows * vocab,
            flops=0,
            make=lambda number: _make(session, rows, vocab, number),
            run=run,
            error=error,
            others={"torch sort": by_sorting},
        )


def sorted_filter(logits_RV: Tensor, temperature_R: Tensor, top_k: int, top_p: float) -> Tensor:
    """Logits with -inf for what the filters leave out."""
    values, order = (logits_RV / temperature_R[:, None]).sort(dim=-1, descending=True, stable=True)
    place = torch.arange(values.shape[1], device=values.device)
    values = values.masked_fill(place >= top_k, -torch.inf)
    probabilities = values.softmax(-1)
    before = probabilities.cumsum(-1) - probabilities
    values = values.masked_fill(before >= top_p, -torch.inf)
    left_out = torch.zeros_like(order, dtype=torch.bool).scatter_(-1, order, values.isinf())
    return logits_RV.masked_fill(left_out, -torch.inf)
