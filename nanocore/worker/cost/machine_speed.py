"""What the machine gives: how fast memory is read and matrices are multiplied, measured briefly.

Memory is read where no cache holds it; and on a CPU whose caches can hold what a step of few tokens
reads, as much as that, too. A CPU's cores work each for itself, and what counts is the time that
they are given: another program that holds one up says nothing of the machine. The best of some
stretches of time counts. Programs that use the memory meanwhile do slow it down; so a measurement
waits for quiet stretches a while.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import cycle
from threading import Barrier
from typing import Final, NamedTuple

import torch
import torch.nn.functional as F

from nanocore.worker.cost.model_cost import MachineSpeed

STRETCH_S: Final = 0.004
"""Short enough for a start, which measures three figures in three stretches each."""

_NUM_STRETCHES: Final = 3
_MAX_STRETCHES: Final = 9
"""The most that are tried on a machine that other programs use, too."""
_QUIET_SHARE: Final = 0.9
"""Share of a stretch's time that a quiet machine gives to each of our threads."""
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


class _Rate(NamedTuple):
    """Work per second of all threads together, and if the machine was quiet meanwhile."""

    per_s: float
    is_quiet: bool


def measure_speed(
    device: torch.device,
    dtype: torch.dtype,
    step_bytes: int,
    stretch_s: float = STRETCH_S,
    room_bytes: int | None = None,
) -> MachineSpeed:
    """Measure this device, or as many CPU cores as torch uses; takes some hundredths of a second.

    Args:
        dtype: of what is multiplied. step_bytes: that a step of one token reads.
        stretch_s: that something is done over and over for a figure.
        room_bytes: memory that it may take for the moment, at least a megabyte or two; None: as
        much as it needs.
    """
    far_bytes = _FAR_BYTES[device.type]
    if room_bytes is not None:
        far_bytes = min(far_bytes, max(room_bytes, _MIN_READ_BYTES))
    near_bytes = max(step_bytes, _MIN_READ_BYTES)
    is_cpu = device.type == "cpu"
    if not is_cpu or near_bytes > min(_CPU_CACHE_BYTES // 2, far_bytes):
        near_bytes = 0
    num_cores = torch.get_num_threads() if is_cpu else 1
    clock = time.thread_time if is_cpu else time.perf_counter
    rate = partial(_rate, stretch_s=stretch_s, clock=clock)

    def read_rate(num_bytes: int) -> float:
        return rate([_read(device, num_bytes // num_cores) for _ in range(num_cores)])

    # CPUs without instructions for the dtype are faster in float32, which our kernels then use.
    dtypes = dict.fromkeys((dtype, torch.float32) if is_cpu else (dtype,))
    try:
        return MachineSpeed(
            bytes_per_s=read_rate(far_bytes),
            flops_per_s=max(rate([_multiply(device, one)] * num_cores) for one in dtypes),
            near_bytes=near_bytes,
            near_bytes_per_s=read_rate(near_bytes) if near_bytes else 0.0,
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
    stretches: list[_Rate] = []
    with ThreadPoolExecutor(len(works), initializer=torch.set_num_threads, initargs=(1,)) as cores:
        while len(stretches) < _MAX_STRETCHES and _num_quiet(stretches) < _NUM_STRETCHES:
            stretches.append(_stretch(cores, works, stretch_s, clock))
    return max(stretches).per_s


def _num_quiet(stretches: list[_Rate]) -> int:
    return sum(one.is_quiet for one in stretches)


def _stretch(
    cores: ThreadPoolExecutor, works: list[_Work], stretch_s: float, clock: Callable[[], float]
) -> _Rate:
    meet = Barrier(len(works))

    def run(work: _Work) -> _Rate:
        meet.wait()
        started_s, begun_s = time.monotonic(), clock()
        done = work()
        while (now_s := clock()) - begun_s < stretch_s:
            done += work()
        given_s, passed_s = now_s - begun_s, time.monotonic() - started_s
        return _Rate(done / given_s, given_s >= _QUIET_SHARE * passed_s)

    rates = list(cores.map(run, works))
    return _Rate(sum(one.per_s for one in rates), all(one.is_quiet for one in rates))


def _join(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
