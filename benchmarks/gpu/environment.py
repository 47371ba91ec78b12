"""What is on the machine and what works there, so that later calls can be planned.

Every probe is small and reports its own failure; the first call on a new machine runs this.
"""

from __future__ import annotations

import importlib.metadata
import shutil
import subprocess
from collections.abc import Callable
from typing import Any, Final

import torch

from benchmarks.gpu import fa3
from benchmarks.gpu.session import LackingError, Results, Session
from benchmarks.gpu.timing import synchronize

_QUERY: Final = (
    "name,driver_version,memory.total,clocks.sm,clocks.max.sm,clocks.mem,clocks.max.mem,"
    "power.limit,temperature.gpu,utilization.gpu"
)


def measure(session: Session) -> None:
    """Run all probes."""
    results = Results(session, "env")
    probes: dict[str, Callable[[], Any]] = {
        "gpu": lambda: _gpu(session),
        "tools": _tools,
        "triton": lambda: _triton(session),
        "cuda_graph": lambda: _cuda_graph(session),
        "fa3": lambda: _fa3(session),
        "packages": _packages,
        "nanocore_kernels": lambda: _nanocore(session),
    }
    results.run(probes)


def _gpu(session: Session) -> dict[str, str] | None:
    """As nvidia-smi tells it; clocks are those of an idle card here."""
    if not session.on_gpu:
        return None
    command = ["nvidia-smi", f"--query-gpu={_QUERY}", "--format=csv,noheader"]
    values = _output(command).split("\n")[0].split(", ")
    return dict(zip(_QUERY.split(","), values, strict=False))


def _tools() -> dict[str, str | None]:
    """ncu answers its version where it can run at all; whether it reads counters is not asked."""
    found: dict[str, str | None] = {}
    for tool in ("ncu", "nvcc", "cuobjdump", "compute-sanitizer", "nvidia-smi", "g++"):
        path = shutil.which(tool)
        found[tool] = _output([path, "--version"]).strip().split("\n")[-1][:100] if path else None
    return found


def _triton(session: Session) -> dict[str, Any]:
    """Compile and run a kernel."""
    from benchmarks.gpu.empty_kernel import add_one

    x = torch.zeros(256, device=session.device)
    add_one(x)
    synchronize(session.device)
    if not bool((x == 1).all()):
        raise RuntimeError(f"x + 1 is {x[:4].tolist()}")
    return {"version": importlib.metadata.version("triton"), "works": True}


def _cuda_graph(session: Session) -> bool | None:
    if not session.on_gpu:
        return None
    x = torch.zeros(16, device=session.device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        x += 1
    graph.replay()
    graph.replay()
    return bool((x == 2).all())


def _fa3(session: Session) -> dict[str, Any]:
    """Load the carried library and compare one small call with torch."""
    if not session.on_gpu:
        return {"carried": fa3.is_carried(session.carried)}
    if not fa3.load(session.carried):
        raise LackingError("not carried: FlashAttention 3")
    schema = str(torch.ops._vllm_fa3_C.fwd.default._schema)
    q, k, v = (torch.randn(100, 4, 128, device=session.device, dtype=torch.bfloat16) for _ in "qkv")
    starts = torch.tensor([0, 100], dtype=torch.int32, device=session.device)
    out = fa3.attention(q, k, v, starts, 100, 100, scale=128**-0.5, key_start_A=starts)
    heads = (x.transpose(0, 1).float() for x in (q, k, v))
    expected = torch.nn.functional.scaled_dot_product_attention(*heads, is_causal=True)
    error = (out.float() - expected.transpose(0, 1)).norm() / expected.norm()
    return {"carried": True, "schema": schema, "relative_error": error.item()}


def _packages() -> dict[str, str]:
    """Everything that is installed: what need not be carried next time."""
    return dict(sorted((d.name, d.version) for d in importlib.metadata.distributions() if d.name))


def _nanocore(session: Session) -> dict[str, str]:
    """Which kernels the engine would take here."""
    from nanocore.kernels.select import select_kernels

    return {"auto": select_kernels("auto", session.device).name}


def _output(command: list[str]) -> str:
    found = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    return found.stdout or found.stderr
