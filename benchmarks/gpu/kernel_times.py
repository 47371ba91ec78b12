"""Attention and products of the backend: right or wrong, how fast, of what it could be.

The least time is that of moving the operands and results once at the rate of a copy, or of the
multiplications at that of a large product, whichever is longer. A kernel whose result is wrong is
timed, too, but is an error.
"""

from __future__ import annotations

import gc
from functools import partial
from itertools import chain
from typing import Any, Final

import torch

from benchmarks.gpu.attention_cases import attention_cases
from benchmarks.gpu.kernel_case import KernelCase
from benchmarks.gpu.layer_cases import layer_cases
from benchmarks.gpu.session import Results, Session
from benchmarks.gpu.shapes import Rates, rates
from benchmarks.gpu.timing import num_sets, synchronize, time_calls
from nanocore.kernels.interface import Kernels
from nanocore.kernels.select import select_kernels

MAX_ERROR: Final = 0.02
"""bfloat16 operands and results: 1e-3 to 1e-2 of the norm."""


def measure(session: Session) -> None:
    """All cases; the most telling ones first, in case the time does not suffice for all."""
    kernels = _kernels(session)
    results = Results(session, "kernels", hangs_s=60.0)
    results.data["kernels"] = kernels.name
    results.data["rates_measured"] = rates(session).measured
    with torch.inference_mode():
        results.run(
            {
                name: partial(measure_case, session, kernels, case)
                for name, case in all_cases(session).items()
            }
        )


def all_cases(session: Session) -> dict[str, KernelCase]:
    """By name, in the order in which they are measured."""
    cases = chain(attention_cases(session), layer_cases(session))
    return {case.name: case for case in cases}


def measure_case(session: Session, kernels: Kernels, case: KernelCase) -> dict[str, Any]:
    """Error, times, and shares of the limit.

    Raises:
        AssertionError: the result is wrong.
    """
    gc.collect()
    if session.on_gpu:
        torch.cuda.empty_cache()
    count = num_sets(case.num_bytes, session.device)
    operands = [case.make(kernels, number) for number in range(count)]
    error = case.error(operands[0], case.run(kernels, operands[0]))

    def timed(calls: list[Any]) -> dict[str, Any]:
        return time_calls(calls, session.device, case.num_bytes)

    limit_us = least_us(case, rates(session))
    ours = timed([partial(case.run, kernels, s) for s in operands])
    ours_us = ours["us"]["median"]
    figures: dict[str, Any] = {
        "error": error,
        "limit_us": round(limit_us, 3),
        "gb_per_s": round(case.num_bytes / ours_us / 1e3, 1),
        "tflop_per_s": round(case.flops / ours_us / 1e6, 2),
        "share_of_limit": round(limit_us / ours_us, 4),
        **ours,
        "others": {},
    }
    for name, prepare in case.others.items():
        try:
            other = timed([prepare(s) for s in operands])
            other["times_of_ours"] = round(other["us"]["median"] / ours_us, 4)
        except Exception as refusal:  # another implementation may refuse a shape
            synchronize(session.device)
            other = {"error": f"{type(refusal).__name__}: {str(refusal)[:200]}"}
        figures["others"][name] = other
    if not error <= MAX_ERROR:  # NaN is not
        raise AssertionError(f"wrong by {error}; {figures}")
    return figures


def least_us(case: KernelCase, limits: Rates) -> float:
    """Microseconds of the copy or of the product that the case amounts to."""
    return 1e6 * max(case.num_bytes / limits.copy, case.flops / limits.gemm)


def _kernels(session: Session) -> Kernels:
    """Triton's; in a rehearsal without its interpreter, torch's."""
    try:
        return select_kernels("triton", session.device)
    except ValueError:
        return select_kernels("torch", session.device)
