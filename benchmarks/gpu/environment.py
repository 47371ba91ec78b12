"""What is on the machine, and what it can do at its best.

Limits of all other parts come from `env/copy` and `env/gemm`. Operands are random:
products of zeros run faster, for they take less power.
"""

from __future__ import annotations

import importlib.metadata
import shutil
import socket
import subprocess
from functools import partial
from typing import Any, Final

import torch

from benchmarks.gpu.results import Measurements, Results, Session, UnavailableError
from benchmarks.gpu.timing import time_call
from benchmarks.report import spread

_QUERY: Final = "name,driver_version,memory.total,clocks.max.sm,clocks.max.mem,power.limit"
_TOOLS: Final = ("ncu", "nvcc", "cuobjdump", "compute-sanitizer", "nvidia-smi", "gcc", "g++")


def measure(results: Results, _part: str) -> None:
    """All of it."""
    results.run(measurements(results.session))


def measurements(session: Session) -> Measurements:
    """By name."""
    return {
        "env/gpu": partial(_gpu, session),
        "env/installed": _installed,
        "env/copy": partial(_copy, session),
        "env/read": partial(_read, session),
        "env/gemm": partial(_gemm, session),
    }


def _gpu(session: Session) -> dict[str, Any]:
    """As nvidia-smi tells it."""
    if not session.on_gpu:
        raise UnavailableError("needs a GPU")
    command = ["nvidia-smi", f"--query-gpu={_QUERY}", "--format=csv,noheader"]
    found = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    return dict(zip(_QUERY.split(","), found.stdout.strip().split(", "), strict=False))


def _installed() -> dict[str, Any]:
    """Packages and tools: what need not be carried next time. localhost: nano-vllm looks it up."""
    found = sorted((d.name, d.version) for d in importlib.metadata.distributions() if d.name)
    try:
        localhost = socket.gethostbyname("localhost")
    except OSError as error:
        localhost = str(error)
    tools = [tool for tool in _TOOLS if shutil.which(tool)]
    return {"packages": dict(found), "tools": tools, "localhost": localhost}


def _copy(session: Session) -> dict[str, Any]:
    """GB/s of a copy, bytes read and bytes written."""
    num_bytes = 2**22 if session.small else 2**32
    source = torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, device=session.device)
    target = torch.empty_like(source)
    figures = time_call(lambda: target.copy_(source), session.device)
    values = [2 * num_bytes / us / 1e3 for us in figures["us"]["values"]]
    return {"gb_per_s": spread(values, 2), "bytes": num_bytes, "method": figures["method"]}


def _read(session: Session) -> dict[str, Any]:
    """GB/s of a sum over as much: what weights and caches can be read at, which nothing writes."""
    num_bytes = 2**22 if session.small else 2**32
    source = torch.ones(num_bytes // 4, dtype=torch.float32, device=session.device)
    figures = time_call(lambda: torch.sum(source), session.device)
    values = [num_bytes / us / 1e3 for us in figures["us"]["values"]]
    return {"gb_per_s": spread(values, 2), "bytes": num_bytes, "method": figures["method"]}


def _gemm(session: Session) -> dict[str, Any]:
    """TFLOP/s of a product of bfloat16 that fills the chip."""
    size = 128 if session.small else 8192
    a, b = (torch.randn(size, size, dtype=torch.bfloat16, device=session.device) for _ in "ab")
    figures = time_call(partial(torch.nn.functional.linear, a, b), session.device)
    values = [2 * size**3 / us / 1e6 for us in figures["us"]["values"]]
    return {"tflop_per_s": spread(values, 3), "size": size, "method": figures["method"]}
