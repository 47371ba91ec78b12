"""What the machine gives: how fast memory is read and matrices are multiplied, measured briefly.

Memory is read where no cache holds it. A CPU's cores work each for itself, and what counts is the
time that they are given: another program that holds one up says nothing of the machine. The best of
some stretches of time counts, since programs that use the memory meanwhile do slow it down.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import cycle
from threading import Barrier
from typing import Final

import torch
import torch.nn.functional as F

from nanocore.worker.cost.model_cost import MachineSpeed

STRETCH_S: Final = 0.004
"""Short enough for a start, which measures three figures in three stretches each."""

_NUM_STRETCHES: Final = 3
_MIN_READ_BYTES: Final = 1 << 20
_PIECE_BYTES: Final = {"cpu": 2 << 20, "cuda": 1 << 30}
"""Read at once; on CUDA a launch is to take little beside it."""
_CPU_CACHE_BYTES: Final = 32 << 20
"""What a process may have of a CPU's largest cache, about: no name for it works everywhere."""
_FAR_BYTES: Final = {"cpu": 3 * _CPU_CACHE_BYTES, "cuda": 1 << 30}
"""Several times a cache, of which then little is left from the time before."""
_MATRIX: Final = {"cpu": (128, 1024), "cuda": (8192, 8192)}
"""Rows that are multiplied with a square matrix, and its size."""

_Work = Callable[[], int]
"""Does something, and says how much."""


def measure_speed(
    device: torch.device,
    dtype: torch.dtype,
    stretch_s: float = STRETCH_S,
    room_bytes: int | None = None,
) -> MachineSpeed:
    """Measure this device, or as many CPU cores as torch uses; takes some hundredths of a second.

    Args:
        dtype: of what is multiplied.
        stretch_s: that something is done over and over for a figure.
        room_bytes: memory that it may take for the moment, at least a megabyte or two; None: as
        much as it needs.
    """
    far_bytes = _FAR_BYTES[device.type]
    if room_bytes is not None:
        far_bytes = min(far_bytes, max(room_bytes, _MIN_READ_BYTES))
    is_cpu = device.type == "cpu"
    num_cores = torch.get_num_threads() if is_cpu else 1
    clock = time.thread_time if is_cpu else time.perf_counter
    rate = partial(_rate, stretch_s=stretch_s, clock=clock)
    # CPUs without instructions for the dtype are faster in float32, which our kernels then use.
    dtypes = dict.fromkeys((dtype, torch.float32) if is_cpu else (dtype,))
    try:
        return MachineSpeed(
            bytes_per_s=rate([_read(device, far_bytes // num_cores) for _ in range(num_cores)]),
            flops_per_s=max(rate([_multiply(device, one)] * num_cores) for one in dtypes),
        )
    finally:
        if is_cpu:
            torch.set_num_threads(num_cores)
        else:
            torch.cuda.empty_cache()  # what was measured with is the KV cache's


def _read(device: torch.device, num_bytes: int) -> _Work:
    memory = torch.full((num_bytes // 8,), 1, dtype=torch.int64, device=device)
    pieces = cycle(memory.split(_PIECE_BYTES[device.type] // 8))

    def read() -> int:
        piece = next(pieces)
        piece.amax()
        _join(device)
        return piece.nbytes

    return read


def _multiply(device: torch.device, dtype: torch.dtype) -> _Work:
    num_rows, size = _MATRIX[device.type]
    # Random numbers: a GPU multiplies constant ones faster, for they take less power.
    x_TI = torch.empty(num_rows, size, dtype=dtype, device=device).uniform_(-1, 1)
    weight_OI = torch.empty(size, size, dtype=dtype, device=device).uniform_(-1, 1)

    def multiply() -> int:
        F.linear(x_TI, weight_OI)
        _join(device)
        return 2 * num_rows * size * size

    return multiply


def _rate(works: list[_Work], stretch_s: float, clock: Callable[[], float]) -> float:
    """Measure each work on its own core; the best stretch counts."""
    with ThreadPoolExecutor(len(works), initializer=torch.set_num_threads, initargs=(1,)) as cores:
        return max(_stretch(cores, works, stretch_s, clock) for _ in range(_NUM_STRETCHES))


def _stretch(
    cores: ThreadPoolExecutor, works: list[_Work], stretch_s: float, clock: Callable[[], float]
) -> float:
    """Return work per second of all threads together."""
    meet = Barrier(len(works))

    def run(work: _Work) -> float:
        meet.wait()
        begun_s = clock()
        done = work()
        while (now_s := clock()) - begun_s < stretch_s:
            done += work()
        return done / (now_s - begun_s)

    return sum(cores.map(run, works))


def _join(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
