"""How long a piece of device work takes, with data that the L2 cache does not hold.

On CUDA the calls go into a graph, which takes the host's part out of it, and the graph's replays
are timed by events. Each call has the next set of operands, and all sets together are larger than
the L2 cache, as weights and KV are that a step reads once. Elsewhere calls are timed by the clock.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch

from benchmarks.machine import spread

_REPLAYS: Final = 7
_TARGET_S: Final = 0.02
"""A replay is about this long, so that its own start counts for nothing."""
_MAX_CALLS: Final = 200
_MAX_SETS: Final = 16
_L2_FACTOR: Final = 3
_LARGE_BYTES: Final = 2e9


def num_sets(num_bytes: float, device: torch.device) -> int:
    """Sets of operands of this size that flush the L2 cache between two uses of one of them."""
    if device.type != "cuda":
        return 2
    if num_bytes > _LARGE_BYTES:
        return 1  # its end has pushed its beginning out
    l2_bytes = torch.cuda.get_device_properties(device).L2_cache_size
    return max(2, min(_MAX_SETS, math.ceil(_L2_FACTOR * l2_bytes / max(num_bytes, 1))))


def time_calls(calls: Sequence[Callable[[], Any]], device: torch.device) -> dict[str, Any]:
    """Microseconds of a call: median, range, and how they were taken. One call for each set."""
    for call in calls:
        call()  # compiles, and allocates what is kept
    if device.type != "cuda":
        return {"us": spread([1e6 * _clock_s(calls) for _ in range(3)]), "method": "clock"}
    torch.cuda.synchronize()
    num_calls = min(_MAX_CALLS, max(len(calls), int(_TARGET_S / max(1e-6, _event_s(calls)))))
    try:
        replay: Callable[[], Any] = _capture(calls, num_calls).replay
        method = "graph"
    except RuntimeError as error:  # it waits for the device, or allocates from the host
        torch.cuda.synchronize()
        replay, method = _loop(calls, num_calls), f"eager ({str(error).splitlines()[0][:80]})"
    replay()
    times = [1e6 * _timed_s(replay) / num_calls for _ in range(_REPLAYS)]
    return {"us": spread([round(t, 3) for t in times]), "method": method, "sets": len(calls)}


def time_host(call: Callable[[], Any], num_calls: int, device: torch.device) -> dict[str, Any]:
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


def _capture(calls: Sequence[Callable[[], Any]], num_calls: int) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        _loop(calls, num_calls)()
    return graph


def _loop(calls: Sequence[Callable[[], Any]], num_calls: int) -> Callable[[], None]:
    def run() -> None:
        for i in range(num_calls):
            calls[i % len(calls)]()

    return run


def _event_s(calls: Sequence[Callable[[], Any]]) -> float:
    """Seconds of a call, roughly."""
    return _timed_s(lambda: [call() for call in calls]) / len(calls)


def _timed_s(run: Callable[[], Any]) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3


def _clock_s(calls: Sequence[Callable[[], Any]]) -> float:
    start_s = time.perf_counter()
    for call in calls:
        call()
    return (time.perf_counter() - start_s) / len(calls)
