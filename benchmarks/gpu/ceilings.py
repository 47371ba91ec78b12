"""What the machine can do at its best: copies, reads, a product of matrices, launches.

Everything else is a share of these. Operands are random: products of zeros run faster on a GPU than
products of anything else, for they take less power.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from benchmarks.gpu.session import Results, Session
from benchmarks.gpu.timing import time_calls, time_host
from benchmarks.machine import spread


def measure(session: Session) -> None:
    """Measure all ceilings; they are in the report of `env`."""
    mib = 2**20
    plan: dict[str, Callable[[], Any]] = {}
    for name, num_bytes in {
        "copy": 4096 * mib,
        "read": 4096 * mib,
        "copy/256_mib": 256 * mib,
    }.items():
        size = 4 * mib if session.small else num_bytes
        plan[name] = partial(_bandwidth, name, size, session.device)
    plan["gemm/8192"] = partial(_gemm, 128 if session.small else 8192, session.device)
    plan["launch"] = partial(_launch, session)
    Results(session, "env").run(plan)


def _bandwidth(name: str, num_bytes: int, device: torch.device) -> dict[str, Any]:
    """GB/s; of a copy, bytes read and bytes written."""
    source = torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, device=device)
    if name == "read":
        words, moved = source.view(torch.int64), num_bytes
        figures = time_calls([lambda: torch.amax(words)], device)
    else:
        target, moved = torch.empty_like(source), 2 * num_bytes
        figures = time_calls([lambda: target.copy_(source)], device)
    values = [round(moved / us / 1e3, 2) for us in figures["us"]["values"]]
    return {"gb_per_s": spread(values), "bytes": num_bytes, "method": figures["method"]}


def _gemm(size: int, device: torch.device) -> dict[str, Any]:
    """TFLOP/s of a product of bfloat16 that fills the chip."""
    calls = []
    for _ in range(2):
        a, b = (torch.randn(size, size, dtype=torch.bfloat16, device=device) for _ in "ab")
        calls.append(partial(torch.nn.functional.linear, a, b))
    figures = time_calls(calls, device)
    values = [round(2 * size**3 / us / 1e6, 3) for us in figures["us"]["values"]]
    return {"us": figures["us"], "tflop_per_s": spread(values), "method": figures["method"]}


def _launch(session: Session) -> dict[str, Any]:
    """Microseconds of an empty Triton kernel: on the host, and from node to node of a graph."""
    from benchmarks.gpu.empty_kernel import launch_empty

    x = torch.zeros(1, device=session.device)
    launch_empty(x)
    num_calls = 3 if session.small else 500
    figures: dict[str, Any] = {
        "host_us": time_host(lambda: launch_empty(x), num_calls, session.device),
        "torch_host_us": time_host(lambda: x.zero_(), num_calls, session.device),
    }
    if session.on_gpu:
        figures["in_graph_us"] = time_calls([lambda: launch_empty(x)], session.device)["us"]
    return figures
