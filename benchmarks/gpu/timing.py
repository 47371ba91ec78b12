"""How long a piece of device work takes, with data that the L2 cache does not hold.

On CUDA the calls go into a graph, which takes the host's part out of it, and the graph's replays
are timed by events. Each call has the next set of operands, and all sets together are three times
as large as the L2 cache, as weights and KV are that a step reads once. Of operands so small that
this would take more than 64 sets, a large buffer is read before each call instead, and the time of
these reads alone, replayed in turn with them, is subtracted. (Reads, for lines that were written
would still have to be written back in the call's time.) Elsewhere calls are timed by the clock.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any, Final

import torch

from benchmarks.machine import spread

Call = Callable[[], Any]
_REPLAYS: Final = 7
_TARGET_S: Final = 0.02
"""A replay is about this long, so that its own start counts for nothing."""
_MAX_CALLS: Final = 200
_FLUSHED_CALLS: Final = 50
_MAX_SETS: Final = 64
_L2_FACTOR: Final = 3


def num_sets(num_bytes: float, device: torch.device) -> int:
    """Sets of operands of this size that flush the L2 cache between two uses of one of them.

    2 if that would be too many; `time_calls` then flushes it.
    """
    needed = math.ceil(_L2_FACTOR * _l2_bytes(device) / max(num_bytes, 1)) + 1
    return 2 if device.type != "cuda" or needed > _MAX_SETS else needed


def time_calls(
    calls: Sequence[Call], device: torch.device, num_bytes: float = math.inf
) -> dict[str, Any]:
    """Microseconds of a call: median, range, and how they were taken.

    calls: one for each set of operands, `num_sets` of them. num_bytes: what one call touches.
    """
    for call in calls:
        call()  # compiles, and allocates what is kept
    if device.type != "cuda":
        return {"us": spread([1e6 * _clock_s(calls)]), "method": "clock"}
    torch.cuda.synchronize()
    if (len(calls) - 1) * num_bytes < _L2_FACTOR * _l2_bytes(device):
        return _time_flushed(calls, _flush(device))
    num_calls = min(_MAX_CALLS, max(len(calls), int(_TARGET_S / max(1e-6, _event_s(calls)))))
    replay, method = replayed(calls, num_calls)
    replay()
    times = [1e6 * _timed_s(replay) / num_calls for _ in range(_REPLAYS)]
    return {"us": spread([round(t, 3) for t in times]), "method": method, "sets": len(calls)}


def subtract(with_calls_us: Sequence[float], without_us: Sequence[float]) -> list[float]:
    """Each time less the median of what it has beside the call; not below 1 ns."""
    beside_us = median(without_us)
    return [round(max(1e-3, us - beside_us), 3) for us in with_calls_us]


def replayed(calls: Sequence[Call], num_calls: int) -> tuple[Call, str]:
    """What makes so many calls, the sets in turn, as a graph if it can be; and which it is."""

    def loop() -> None:
        for i in range(num_calls):
            calls[i % len(calls)]()

    try:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            loop()
    except RuntimeError as error:  # it waits for the device, or allocates from the host
        torch.cuda.synchronize()
        return loop, f"eager ({str(error).splitlines()[0][:80]})"
    return graph.replay, "graph"


def time_host(call: Call, num_calls: int, device: torch.device) -> dict[str, Any]:
    """Microseconds that the host takes to make a call, the device's work not waited for."""
    values = []
    for _ in range(_REPLAYS):
        synchronize(device)
        start_s = time.perf_counter()
        for _ in range(num_calls):
            call()
        values.append(round(1e6 * (time.perf_counter() - start_s) / num_calls, 3))
        synchronize(device)
    return spread(values)


def synchronize(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _flush(device: torch.device) -> Call:
    """Reads what the L2 cache cannot hold."""
    buffer = torch.zeros(_L2_FACTOR * _l2_bytes(device) // 8, dtype=torch.int64, device=device)
    return lambda: torch.amax(buffer)


def _time_flushed(calls: Sequence[Call], flush: Call) -> dict[str, Any]:
    flushed = [step for call in calls for step in (flush, call)]
    with_calls, method = replayed(flushed, 2 * _FLUSHED_CALLS)
    alone, _ = replayed([flush], _FLUSHED_CALLS)
    times: dict[Call, list[float]] = {with_calls: [], alone: []}
    for _ in range(_REPLAYS + 1):
        for replay, found in times.items():
            found.append(1e6 * _timed_s(replay) / _FLUSHED_CALLS)
    values = subtract(times[with_calls][1:], times[alone][1:])
    return {"us": spread(values), "method": f"{method}, flushed", "sets": len(calls)}


def _l2_bytes(device: torch.device) -> int:
    if device.type != "cuda":
        return 0
    return int(torch.cuda.get_device_properties(device).L2_cache_size)


def _event_s(calls: Sequence[Call]) -> float:
    """Seconds of a call, roughly."""
    return _timed_s(lambda: [call() for call in calls]) / len(calls)


def _timed_s(run: Call) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3


def _clock_s(calls: Sequence[Call]) -> float:
    start_s = time.perf_counter()
    for call in calls:
        call()
    return (time.perf_counter() - start_s) / len(calls)
