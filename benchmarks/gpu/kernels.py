"""Attention, products and states of the backend: right or wrong, how fast, of what it could be.

The least time is that of moving the operands and results once at the rate of a copy, or of the
multiplications at that of a large product, whichever is longer. Right is what the reference backend
makes of the same operands. A kernel whose result is wrong is timed, too, but is an error.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor

from benchmarks.gpu.results import Measurements, Results, Session
from benchmarks.gpu.shapes import Rates, rates
from benchmarks.gpu.timing import synchronize, time_call
from nanocore.kernels.interface import Kernels
from nanocore.kernels.select import select_kernels
from nanocore.kernels.torch.backend import TorchKernels

MAX_ERROR: Final = 0.02
"""bfloat16 operands and results: 1e-3 to 1e-2 of the norm."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelCase:
    """One kernel at one shape. num_bytes, flops: what any implementation has to move and multiply.

    make: operands, as a backend wants them. run: a backend's kernel on them. others: what else
    computes the same, by name: given operands each returns the call to time.
    """

    name: str
    num_bytes: float
    flops: float
    make: Callable[[Kernels], Any]
    run: Callable[[Kernels, Any], Tensor]
    others: dict[str, Callable[[Any], Callable[[], Any]]] = field(default_factory=dict)


def measure(results: Results, part: str) -> None:
    """All cases; the most telling ones first, in case the time does not suffice for all."""
    with torch.inference_mode():
        results.run(measurements(results, part), hangs_s=120)


def measurements(results: Results, part: str) -> Measurements:
    """By name."""
    kernels, limits = kernels_of(results.session), rates(results)
    return {
        case.name: partial(measure_case, results.session, kernels, case, limits)
        for case in cases(results.session, part)
    }


def cases(session: Session, part: str) -> Iterator[KernelCase]:
    """Of attention, of products, or of layers with states."""
    from benchmarks.gpu.attention_cases import attention_cases
    from benchmarks.gpu.product_cases import product_cases
    from benchmarks.gpu.state_cases import state_cases

    found = {"attention": attention_cases, "products": product_cases, "states": state_cases}
    return found[part](session)


def measure_case(
    session: Session, kernels: Kernels, case: KernelCase, limits: Rates
) -> dict[str, Any]:
    """Error, times, and shares of the limit.

    Raises:
        AssertionError: the result is wrong.
    """
    gc.collect()
    if session.on_gpu:
        torch.cuda.empty_cache()
    operands = case.make(kernels)
    out, expected = (case.run(k, operands).double() for k in (kernels, TorchKernels()))
    error = float((out - expected).norm() / expected.norm())
    del out, expected
    ours = time_call(partial(case.run, kernels, operands), session.device)
    ours_us = ours["us"]["median"]
    limit_us = 1e6 * max(case.num_bytes / limits.bytes, case.flops / limits.gemm)
    figures: dict[str, Any] = {
        "kernels": kernels.name,
        "error": error,
        "limit_us": round(limit_us, 3),
        "share_of_limit": round(limit_us / ours_us, 4),
        "gb_per_s": round(case.num_bytes / ours_us / 1e3, 1),
        "tflop_per_s": round(case.flops / ours_us / 1e6, 2),
        **ours,
        "others": {},
    }
    for name, prepare in case.others.items():
        try:
            other = time_call(prepare(operands), session.device)
            other["times_of_ours"] = round(other["us"]["median"] / ours_us, 4)
        except Exception as refusal:  # another implementation may refuse a shape
            synchronize(session.device)
            other = {"error": f"{type(refusal).__name__}: {str(refusal)[:200]}"}
        figures["others"][name] = other
    if not error <= MAX_ERROR:  # NaN is not
        raise AssertionError(f"wrong by {error}; {figures}")
    return figures


def draw(session: Session, *shape: int, std: float = 1.0) -> Tensor:
    """Random operands, the same for a shape each time."""
    generator = torch.Generator(session.device).manual_seed(sum(shape))
    out = torch.empty(*shape, dtype=dtype_of(session), device=session.device)
    return out.normal_(std=std, generator=generator)


def dtype_of(session: Session) -> torch.dtype:
    """Of operands and results; a CPU rehearses in one that it computes exactly enough."""
    return torch.bfloat16 if session.on_gpu else torch.float32


def kernels_of(session: Session) -> Kernels:
    """Those to measure: Triton's, or torch's in a rehearsal without Triton's interpreter."""
    try:
        return select_kernels("triton", session.device)
    except ValueError:
        return select_kernels("torch", session.device)
