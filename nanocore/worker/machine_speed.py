"""What the machine gives: how fast memory is read and matrices are multiplied, measured briefly.

Memory is read where no cache holds it; and if caches can hold what a step of few tokens reads, as
much as that, too. The best of some tries counts: neighbours only ever slow it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from nanocore.worker.model_cost import MachineSpeed

_MIN_READ_BYTES: Final = 1 << 20
_CPU_CACHE_BYTES: Final = 32 << 20
"""What a process may have of a CPU's largest cache, about: no name for it works everywhere."""
_MATRIX: Final = {"cpu": (128, 1024), "cuda": (8192, 8192)}
"""Rows that are multiplied with a square matrix, and its size."""
TRIES_S: Final = 0.005
"""For each figure: short enough for a start."""

_FAR: Final = 3
"""Times a cache, of which then little is left from the time before."""
_MIN_TRIES, _MAX_TRIES = 5, 40
_USUAL_BYTES_PER_S: Final = {"cpu": 20e9, "cuda": 1e12}
_USUAL_FLOPS_PER_S: Final = {"cpu": 2e11, "cuda": 1e14}
"""For the number of tries; nothing else depends on it."""


def measure_speed(
    device: torch.device,
    dtype: torch.dtype,
    step_bytes: int,
    tries_s: float = TRIES_S,
    room_bytes: int | None = None,
) -> MachineSpeed:
    """Of this device, or of the CPU cores that torch uses here. Takes tens of milliseconds.

    Args:
        dtype: of what is multiplied. step_bytes: that a step of one token reads.
        room_bytes: memory that it may take for the moment, at least a megabyte or two; None: as
        much as it needs.
        tries_s: for the tries of each figure, about, on a usual machine.
    """
    tries = _Tries(device, tries_s)
    cache_bytes = _cache_bytes(device)
    room_bytes = _FAR * cache_bytes if room_bytes is None else max(room_bytes, _MIN_READ_BYTES)
    near_bytes = max(step_bytes, _MIN_READ_BYTES) & ~63
    if near_bytes > min(cache_bytes // 2, room_bytes):
        near_bytes = 0
    speed = MachineSpeed(
        bytes_per_s=_read_speed(min(_FAR * cache_bytes, room_bytes), tries),
        flops_per_s=_multiply_speed(dtype, tries),
        near_bytes=near_bytes,
        near_bytes_per_s=_read_speed(near_bytes, tries) if near_bytes else 0.0,
    )
    if device.type == "cuda":
        torch.cuda.empty_cache()  # what was measured with is the KV cache's
    return speed


def _cache_bytes(device: torch.device) -> int:
    """Of the largest cache."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).L2_cache_size)
    return _CPU_CACHE_BYTES


@dataclass(frozen=True, slots=True)
class _Tries:
    """Of the same work on a device; see `measure_speed`."""

    device: torch.device
    tries_s: float

    def least_s(self, work: Callable[[], Tensor], usual_s: float) -> float:
        """Seconds of the best, after one that warms up. usual_s: of one, on a usual machine."""
        work()
        seconds = []
        for _ in range(min(max(int(self.tries_s / usual_s), _MIN_TRIES), _MAX_TRIES)):
            self._join()
            start_s = time.perf_counter()
            work()
            self._join()
            seconds.append(time.perf_counter() - start_s)
        return min(seconds)

    def _join(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def _read_speed(num_bytes: int, tries: _Tries) -> float:
    memory = torch.full((num_bytes // 8,), 1, dtype=torch.int64, device=tries.device)
    usual_s = num_bytes / _USUAL_BYTES_PER_S[tries.device.type]
    return num_bytes / tries.least_s(memory.amax, usual_s)


def _multiply_speed(dtype: torch.dtype, tries: _Tries) -> float:
    num_rows, size = _MATRIX[tries.device.type]
    x_TI = torch.ones(num_rows, size, dtype=dtype, device=tries.device)
    weight_OI = torch.ones(size, size, dtype=dtype, device=tries.device)
    flops = 2 * num_rows * size * size
    usual_s = flops / _USUAL_FLOPS_PER_S[tries.device.type]
    return flops / tries.least_s(lambda: F.linear(x_TI, weight_OI), usual_s)
