"""Choosing tokens from logits: greedy, with noise, and among the likeliest."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from benchmarks.gpu.kernel_case import Draw, KernelCase, share_unequal
from benchmarks.gpu.session import Session, UnavailableError
from benchmarks.gpu.shapes import models
from nanocore.kernels.backend import Filters, Kernels, Noise
from nanocore.kernels.torch_backend import TorchKernels

_REFERENCE = TorchKernels()
Operands = tuple[Tensor, Noise, Filters]


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
        name=f"sampling/best_token/greedy/{rows}",
        num_bytes=4 * rows * vocab,
        flops=0,
        make=lambda _, number: _make(session, rows, vocab, number),
        run=lambda kernels, s: kernels.best_token(s[0], 0)[1],
        error=lambda s, out: share_unequal(out, s[0].argmax(-1)),
        others={"torch": lambda s: partial(torch.argmax, s[0], -1)},
    )

    def softmax_and_exponential(s: tuple[Tensor, Noise]) -> Tensor:
        """What engines without a kernel of their own do."""
        probabilities = torch.softmax(s[0] / s[1].temperature_R[:, None], -1)
        return (probabilities / torch.empty_like(probabilities).exponential_()).argmax(-1)

    yield KernelCase(
        name=f"sampling/best_token/noise/{rows}",
        num_bytes=4 * rows * vocab,
        flops=0,
        make=lambda _, number: _make(session, rows, vocab, number),
        run=lambda kernels, s: kernels.best_token(s[0], 0, s[1])[1],
        error=lambda s, out: share_unequal(out, _REFERENCE.best_token(s[0], 0, s[1])[1]),
        others={"torch softmax, exponential": lambda s: partial(softmax_and_exponential, s)},
    )


def _filtered(session: Session, rows: int, vocab: int) -> Iterator[KernelCase]:
    kinds = {"top_p 0.9": (vocab, 0.9), "both": (50, 0.9)}
    for kind, (top_k, top_p) in kinds.items():

        def make(_: Kernels, number: int, k: int = top_k, p: float = top_p) -> Operands:
            filters = Filters(
                top_k_R=torch.full((rows,), k, dtype=torch.int32, device=session.device),
                top_p_R=torch.full((rows,), p, device=session.device),
                min_p_R=torch.zeros(rows, device=session.device),
            )
            return *_make(session, rows, vocab, number), filters

        def error(s: Operands, out: Tensor, k: int = top_k, p: float = top_p) -> float:
            """Against a sort in float64, noise added to what stays."""
            kept = sorted_filter(s[0].double(), s[1].temperature_R.double(), k, p)
            return share_unequal(out, _REFERENCE.best_token(kept.float(), 0, s[1])[1])

        def by_sorting(s: Operands, k: int = top_k, p: float = top_p) -> Tensor:
            kept = sorted_filter(s[0], s[1].temperature_R, k, p)
            probabilities = kept.softmax(-1)
            return (probabilities / torch.empty_like(probabilities).exponential_()).argmax(-1)

        yield KernelCase(
            name=f"sampling/best_filtered_token/{kind}/{rows}",
            num_bytes=4 * rows * vocab,
            flops=0,
            make=make,
            run=_filter,
            error=error,
            others={"torch sort": lambda s, by_sorting=by_sorting: partial(by_sorting, s)},
        )


def _filter(kernels: Kernels, operands: Operands) -> Tensor:
    found = kernels.best_filtered_token(*operands)
    if found is None:
        raise UnavailableError(f"{kernels.name} has no such kernel")
    return found[1]


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
