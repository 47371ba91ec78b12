"""Who goes before whom, under either policy: the one sort key of admission, chunks and preemption.

fcfs orders by arrival, priority by (priority, arrival); the handle, which grows, decides among
equals. A preempted request comes back under its old precedence, so it keeps its place.

With ageing, waiting for so many seconds is worth a level of priority. Everybody's waiting grows at
the same pace, so the order of two requests never changes, and the key is fixed when they come.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from nanocore.engine_core.parameters import SchedulingPolicy
from nanocore.engine_core.scheduling.request import Request

Precedence: TypeAlias = tuple[float, int, int]
"""Smaller is admitted earlier, larger is preempted earlier."""
PrecedenceKey: TypeAlias = Callable[[Request], Precedence]


def precedence_key(policy: SchedulingPolicy, aging_s: float) -> PrecedenceKey:
    """A policy's sort key. aging_s: seconds of waiting worth a level of priority; 0: none."""
    if policy == "fcfs":
        return lambda request: (0, request.arrival, request.handle)
    if not aging_s:
        return lambda request: (request.priority, request.arrival, request.handle)
    return lambda request: (
        request.priority + request.arrival_s / aging_s,
        request.arrival,
        request.handle,
    )
