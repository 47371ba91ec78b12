"""Programmatic dependent launch: programs of a kernel are in place before the last one has ended.

Without it a GPU is idle between two kernels for as long as it takes to start one, a microsecond or
two, and a decode step has hundreds. With it the next kernel's programs are started as soon as all
of this one's have been, and wait for its results by themselves. (CUDA programming guide, for
compute capability 9.0 and above; Triton's `launch_pdl`.)
"""

from __future__ import annotations

import os
from functools import cache
from typing import Final

import torch
import torch.distributed as dist
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

_MIN_CAPABILITY: Final = (9, 0)
_VARIABLE: Final = "NANOCORE_PDL"


@triton.jit
def wait_for_inputs(PDL: tl.constexpr) -> None:
    """What every kernel begins with: nothing may be read or written before.

    Whatever came before is done afterwards, for the kernel before has waited likewise.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()


@cache
def pdl(device: torch.device) -> dict[str, bool]:
    """Options of a launch: whether it is a dependent one.

    Of a single rank only: NCCL's kernels come from another stream, and what a graph makes of a
    dependent launch behind them is not known. NANOCORE_PDL=0 turns it off, for comparisons.
    """
    is_dependent = (
        device.type == "cuda"
        and torch.cuda.get_device_capability(device) >= _MIN_CAPABILITY
        and not (dist.is_available() and dist.is_initialized())
        and os.environ.get(_VARIABLE) != "0"
    )
    return {"PDL": True, "launch_pdl": True} if is_dependent else {"PDL": False}
