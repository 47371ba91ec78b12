"""How long a piece of device work takes, with data that the L2 cache does not hold.

On CUDA the calls go into a graph, which takes the host's part out of it, and events time its
replays. Before each call a buffer is read that is larger than the cache, as weights and KV are that
a step reads once; a graph of these reads alone, replayed in turn, is subtracted. (Reads, for lines
that were written would still have to be written back in the call's time.) Elsewhere the clock does.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any, Final

import torch

from benchmarks.report import spread

Call = Callable[[], Any]
_CALLS: Final = 20
"""Calls in a graph."""
_REPLAYS: Final = 9
_L2_FACTOR: Final = 3


def time_call(
    call: Call, device: torch.device, num_calls: int = _CALLS, num_replays: int = _REPLAYS
) -> dict[str, Any]:
    """Microseconds of a call, and how they were taken.

    num_calls: calls in a graph. num_replays: replays of the graph that are timed.
    """
    call()  # compiles, and allocates what is kept
    if device.type != "cuda":
        return {"us": spread([_clock_us(call) for _ in range(2)], 3), "method": "clock"}
    torch.cuda.synchronize()
    flush = _flush(device)
    both, method = _repeated([flush, call], num_calls)
    alone, _ = _repeated([flush], num_calls)
    pairs = [(_event_us(both), _event_us(alone)) for _ in range(num_replays + 1)]
    return {"us": spread(subtract(pairs[1:], num_calls), 3), "method": method}


def subtract(pairs: Sequence[tuple[float, float]], num_calls: int = _CALLS) -> list[float]:
    """Microseconds of a call, from times of all calls with and without what is beside them."""
    beside_us = median(alone_us for _, alone_us in pairs)
    return [max(1e-3, (both_us - beside_us) / num_calls) for both_us, _ in pairs]


def synchronize(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _repeated(calls: Sequence[Call], num_times: int) -> tuple[Call, str]:
    """What makes these calls so many times, as a graph if it can be; and which it is."""

    def loop() -> None:
        for _ in range(num_times):
            for call in calls:
                call()

    try:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            loop()
    except RuntimeError as error:  # it waits for the device, or allocates from the host
        torch.cuda.synchronize()
        return loop, f"eager ({str(error).splitlines()[0][:80]})"
    return graph.replay, "graph"


def _flush(device: torch.device) -> Call:
    """Reads more than the L2 cache holds."""
    l2_bytes = torch.cuda.get_device_properties(device).L2_cache_size
    buffer = torch.zeros(_L2_FACTOR * l2_bytes // 8, dtype=torch.int64, device=device)
    return lambda: torch.amax(buffer)


def _clock_us(call: Call) -> float:
    start_s = time.perf_counter()
    call()
    return 1e6 * (time.perf_counter() - start_s)


def _event_us(run: Call) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    run()
    end.record()
    end.synchronize()
    return 1e3 * start.elapsed_time(end)
