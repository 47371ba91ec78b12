"""What the fake engine tells of its steps, requests and metrics.

A defect is a name that stands beside what it breaks; see fake_engine.py.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field

from nanocore.protocol.metrics import (
    Metric,
    MetricSample,
    RecentSteps,
    RequestPhases,
    Stats,
    StepColumns,
)
from tests.conformance.fake_model import Request


@dataclass
class Watched:
    """A request. reason: once it has ended."""

    request: Request
    session: str
    way: list[tuple[str, float]]
    reason: str | None = None


@dataclass
class FakeWatch:
    """defects: of the engine. steps: (number, when, decode and prefill tokens)."""

    defects: set[str]
    steps: deque[tuple[int, float, int, int]] = field(default_factory=lambda: deque(maxlen=512))
    requests: dict[int, Watched] = field(default_factory=dict)

    def accepted(self, request: Request, session: str) -> None:
        """A request is there."""
        way = [("queued", time.monotonic())]
        self.requests[request.handle] = Watched(request, session, way)

    def step(self, number: int, sampled: Collection[Request]) -> None:
        """A step has given each of these a token."""
        now_s = time.monotonic()
        first = [one for one in sampled if one.num_tokens == 1]
        for one in first:
            watched = self.requests.get(one.handle)
            if watched is not None and watched.reason is None:
                watched.way += [("prefill", now_s), ("decode", now_s)]
        num_prefill = 0 if "prefill-untold" in self.defects else sum(len(r.prompt) for r in first)
        num_decode = 0 if "decode-untold" in self.defects else len(sampled) - len(first)
        self.steps.append((number, now_s, num_decode, num_prefill))

    def ended(self, handle: int, reason: str) -> None:
        """A request is over."""
        watched = self.requests[handle]
        if "end-untold" not in self.defects:
            watched.way.append(("ended", time.monotonic()))
        watched.reason = "stop" if "reason-misread" in self.defects else reason
        if "ways-forgotten" in self.defects:
            del self.requests[handle]

    def metrics(self, num_steps: int, num_tokens: int) -> list[Metric]:
        """Of the engine."""
        counts = [num_tokens, 0] if "bucket-missing" in self.defects else [num_tokens, 0, 0]
        bounds = [2.0, 1.0] if "bounds-mixed" in self.defects else [1.0, 2.0]
        steps = 1e9 - num_steps if "counter-falls" in self.defects else float(num_steps)
        if "metrics-stand" in self.defects:
            counts, steps = [0, 0, 0], 0.0
        told = [
            Metric("num_steps", "counter", "Steps.", [MetricSample(steps)]),
            Metric("seconds", "histogram", "", [MetricSample(1.0, counts=counts)], bounds),
        ]
        return [*told, *told] if "metrics-twice" in self.defects else told

    def recent(self, after: int, session: str, stats: Stats) -> RecentSteps:
        """What a session may see."""
        after = 0 if "after-ignored" in self.defects else after
        steps = [one for one in self.steps if one[0] > after]
        if "newest-first" in self.defects:
            steps.reverse()
        zeros = [0] * len(steps)
        columns = StepColumns(
            number=[number for number, _, _, _ in steps],
            ended_s=[ended_s for _, ended_s, _, _ in steps],
            duration_s=[0.0] * len(steps),
            num_decode_tokens=[num_decode for _, _, num_decode, _ in steps],
            num_prefill_tokens=[num_prefill for _, _, _, num_prefill in steps],
            num_running=zeros[1:] if "column-short" in self.defects else zeros,
            num_waiting=zeros,
            num_used_blocks=zeros,
            num_preempted=zeros,
        )
        ways = [self._way(watched, session) for watched in list(self.requests.values())[-64:]]
        now_s = 0.0 if "clock-stands" in self.defects else time.monotonic()
        return RecentSteps(now_s=now_s, stats=stats, steps=columns, requests=ways)

    def _way(self, watched: Watched, session: str) -> RequestPhases:
        request = watched.request
        is_own = watched.session == session or "names-told" in self.defects
        return RequestPhases(
            handle=request.handle,
            num_prompt_tokens=len(request.prompt),
            num_cached_tokens=0,
            num_output_tokens=request.num_tokens,
            way=watched.way[1:] if "queue-untold" in self.defects else [*watched.way],
            request_id=request.request_id if is_own else "",
            finish_reason=watched.reason,
        )
