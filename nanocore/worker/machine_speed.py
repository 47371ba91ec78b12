"""What the machine gives: how fast memory is read and matrices are multiplied, measured briefly.

Memory is read where no cache holds it; and if caches can hold what a step of few tokens reads, as
much as that, too. The best of some tries counts: neighbours only ever slow it. How many depends on
what is measured and not on how long it takes, so ranks that measure together agree.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor

from nanocore.worker.model_cost import MachineSpeed

_MIN_READ_BYTES: Final = 1 << 20
_CPU_CACHE_BYTES: Final = 32 << 20
"""What a process may have of a CPU's largest cache, about: no name for it works everywhere."""
_MATRIX: Final = {"cpu": (256, 1024), "cuda": (8192, 8192)}
"""Rows that are multiplied with a square matrix, and its size."""
_TRIES_S: Final = 0.01
_MIN_TRIES, _MAX_TRIES = 4, 40
_USUAL_BYTES_PER_S: Final = {"cpu": 20e9, "cuda": 1e12}
_USUAL_FLOPS_PER_S: Final = {"cpu": 2e11, "cuda": 1e14}
"""For the number of tries; nothing else depends on it."""


def measure_speed(
    device: torch.device,
    dtype: torch.dtype,
    step_bytes: int,
    meet: Callable[[], object] = lambda: None,
) -> MachineSpeed:
    """Of this device, or of the CPU cores that torch uses here. Takes tens of milliseconds.

    Args:
        dtype: of what is multiplied. step_bytes: that a step of one token reads.
        meet: waits for ranks that share the memory, so that all of them measure at once.
    """
    cache_bytes = _cache_bytes(device)
    near_bytes = max(step_bytes, _MIN_READ_BYTES) & ~63
    if near_bytes > cache_bytes // 2:
        near_bytes = 0
    return MachineSpeed(
        bytes_per_s=_read_speed(device, 3 * cache_bytes, meet),
        flops_per_s=_multiply_speed(device, dtype, meet),
        near_bytes=near_bytes,
        near_bytes_per_s=_read_speed(device, near_bytes, meet) if near_bytes else 0.0,
    )


def _cache_bytes(device: torch.device) -> int:
    """Of the largest cache."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).L2_cache_size)
    return _CPU_CACHE_BYTES


def _read_speed(device: torch.device, num_bytes: int, meet: Callable[[], object]) -> float:
    memory = torch.full((num_bytes // 8,), 1, dtype=torch.int64, device=device)

    def read() -> Tensor:
        return memory.amax()

    usual_s = num_bytes / _USUAL_BYTES_PER_S[device.type]
    return num_bytes / _least_seconds(read, usual_s, device, meet)


def _multiply_speed(device: torch.device, dtype: torch.dtype, meet: Callable[[], object]) -> float:
    num_rows, size = _MATRIX[device.type]
    x_TI = torch.ones(num_rows, size, dtype=dtype, device=device)
    weight_OI = torch.ones(size, size, dtype=dtype, device=device)

    def multiply() -> Tensor:
        return torch.nn.functional.linear(x_TI, weight_OI)

    flops = 2 * num_rows * size * size
    usual_s = flops / _USUAL_FLOPS_PER_S[device.type]
    return flops / _least_seconds(multiply, usual_s, device, meet)


def _least_seconds(
    work: Callable[[], Tensor], usual_s: float, device: torch.device, meet: Callable[[], object]
) -> float:
    """Of some tries, after one that compiles and warms up. usual_s: of one, on a usual machine."""
    work()
    seconds = []
    for _ in range(min(max(int(_TRIES_S / usual_s), _MIN_TRIES), _MAX_TRIES)):
        _join(device)
        meet()
        start_s = time.perf_counter()
        work()
        _join(device)
        seconds.append(time.perf_counter() - start_s)
    return min(seconds)


def _join(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
