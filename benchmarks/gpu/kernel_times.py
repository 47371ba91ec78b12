"""Every kernel of the backend that the engine takes: right or wrong, how fast, of what it could be.

The least time is that of moving the operands and results once at the rate of a copy, or of the
multiplications at that of a large product, whichever is longer. A kernel whose result is wrong is
timed, too, but is an error.
"""

from __future__ import annotations

import gc
import itertools
from functools import partial
from typing import Any, Final

import torch

from benchmarks.gpu.attention_cases import attention_cases
from benchmarks.gpu.kernel_case import KernelCase
from benchmarks.gpu.layer_cases import layer_cases
from benchmarks.gpu.sampling_cases import sampling_cases
from benchmarks.gpu.session import Results, Session, say
from benchmarks.gpu.shapes import Rates, rates
from benchmarks.gpu.timing import num_sets, time_calls
from nanocore.kernels.backend import Kernels
from nanocore.kernels.selection import select_kernels

MAX_ERROR: Final = 0.02
"""bfloat16 operands and results: 1e-3 to 1e-2 of the norm; of choices, ties and rounding."""


def measure(session: Session) -> None:
    """All cases; the most telling ones first, in case the time does not suffice for all."""
    kernels = _kernels(session)
    results = Results(session, "kernels")
    results.data["kernels"] = kernels.name
    results.data["rates_measured"] = rates(session).measured
    cases = itertools.chain(attention_cases(session), layer_cases(session), sampling_cases(session))
    with torch.inference_mode():
        for case in cases:
            if session.wants(case.name):
                results.measure(case.name, measure_case, session, kernels, case)
                gc.collect()
                if session.on_gpu:
                    torch.cuda.empty_cache()
    results.finish()
    say(table(results.measurements))


def measure_case(session: Session, kernels: Kernels, case: KernelCase) -> dict[str, Any]:
    """Error, times, and shares of the limit.

    Raises:
        AssertionError: the result is wrong.
    """
    first = case.make(0)
    error = case.error(first, case.run(kernels, first))
    operands = [first, *(case.make(i) for i in range(1, num_sets(case.num_bytes, session.device)))]
    limit_us = least_us(case, rates(session))
    ours = time_calls([partial(case.run, kernels, s) for s in operands], session.device)
    figures: dict[str, Any] = {
        "error": error,
        "limit_us": round(limit_us, 3),
        "gb_per_s": round(case.num_bytes / ours["us"]["median"] / 1e3, 1),
        "tflop_per_s": round(case.flops / ours["us"]["median"] / 1e6, 2),
        "share_of_limit": round(limit_us / ours["us"]["median"], 4),
        **ours,
        "others": {},
    }
    for name, run in case.others.items():
        figures["others"][name] = _measure_other(session, run, operands, ours["us"]["median"])
    if not error <= MAX_ERROR:  # NaN is not
        raise AssertionError(f"wrong by {error}; {figures}")
    return figures


def least_us(case: KernelCase, limits: Rates) -> float:
    """Microseconds of the copy or of the product that the case amounts to."""
    return 1e6 * max(case.num_bytes / limits.copy, case.flops / limits.gemm)


def table(measurements: dict[str, Any]) -> str:
    """A line for each case."""
    lines = [f"{'':44}{'us':>10}{'limit':>8}{'error':>10}  times of others over ours"]
    for name, figures in measurements.items():
        others = ", ".join(
            f"{other} {found['times_of_ours']:.2f}" if "us" in found else f"{other} failed"
            for other, found in figures["others"].items()
        )
        lines.append(
            f"{name:44}{figures['us']['median']:>10.1f}{figures['share_of_limit']:>8.0%}"
            f"{figures['error']:>10.1e}  {others}"
        )
    return "\n".join(lines)


def _measure_other(
    session: Session, run: Any, operands: list[Any], ours_us: float
) -> dict[str, Any]:
    """Another implementation may be missing or refuse a shape: that is its own affair."""
    try:
        figures = time_calls([partial(run, s) for s in operands], session.device)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {str(error)[:200]}"}
    return {**figures, "times_of_ours": round(figures["us"]["median"] / ours_us, 4)}


def _kernels(session: Session) -> Kernels:
    """Triton's; in a rehearsal without its interpreter, torch's."""
    try:
        return select_kernels("triton", session.device)
    except ValueError:
        return select_kernels("torch", session.device)
