"""What the step trace says of requests beside their steps: when they came, whence their hits are.

Arrivals and sent outputs belong to no step; they wait here for the next line. Of each KV block it
knows for whom it was given last, so that a hit names who computed it. The step loop's thread owns
it; only `sent` is called from the io thread, and it appends to a deque.
"""

from __future__ import annotations

import time
from collections import deque
from typing import Any

import numpy as np

from nanocore.engine_core.requests.request import TOKEN_DTYPE, Request
from nanocore.engine_core.scheduling.outputs import ClientOutput
from nanocore.engine_core.scheduling.scheduler import Scheduler


class TracedRequests:
    """Of one trace. zero_s: monotonic time that its times count from."""

    def __init__(self, zero_s: float) -> None:
        self._zero_s = zero_s
        self._arrived: list[tuple[Request, float, str | None]] = []  # when, behind which leader
        self._ids: dict[int, str] = {}  # by handle, until its first token
        self._started: dict[int, str] = {}  # likewise, from then until that is sent
        self._sent: deque[tuple[int, float]] = deque()  # (handle, when)
        self._block_owners: dict[int, str] = {}  # id of a request, by block

    def arrived(self, request: Request) -> None:
        """The scheduler has it from now on, and the samples that it holds back."""
        now_s = time.monotonic()
        for sample in request.samples:
            self._ids[sample.handle] = sample.request_id
            leader = None if sample.awaited_sibling is None else sample.awaited_sibling.request_id
            self._arrived.append((sample, now_s, leader))

    def sent(self, output: ClientOutput) -> None:
        """The io thread hands an output to its socket now: which first tokens are in it."""
        if output.events:
            now_s = time.monotonic()
            started = [one.handle for one in output.events if one.num_cached_tokens is not None]
            self._sent.extend((handle, now_s) for handle in started)

    def hits(self, scheduler: Scheduler) -> dict[str, list[str]]:
        """For whom the cached blocks of those that the planned step admits were given, in order."""
        plan, running = scheduler.planned, scheduler.running
        block_size, owners = scheduler.kv_cache.block_size, self._block_owners
        for row, block_ids in plan.blocks.items():
            owners.update(dict.fromkeys(block_ids, running.table.request(row).request_id))
        hits = {}
        for added in plan.added:
            request_id = running.table.request(added.row).request_id
            block_ids = np.frombuffer(added.block_ids, TOKEN_DTYPE).tolist()
            num_hits = added.num_computed_tokens // block_size
            if num_hits:
                origins = [owners[one] for one in block_ids[:num_hits] if one in owners]
                hits[request_id] = list(dict.fromkeys(origins))
            owners.update(dict.fromkeys(block_ids[num_hits:], request_id))
        return hits

    def take(self, scheduler: Scheduler) -> dict[str, Any]:
        """What has come since the last line, after the step that was taken in last."""
        has_priorities = scheduler.config.policy == "priority"
        arrived = [self._arrival(*one, has_priorities) for one in self._arrived]
        self._arrived.clear()
        outcome = scheduler.completed
        for request in outcome.started:
            self._started[request.handle] = self._ids.pop(request.handle, request.request_id)
        for request in outcome.finished:
            self._ids.pop(request.handle, None)
        first = [request.request_id for request in outcome.started]
        sent = {}
        for _ in range(len(self._sent)):
            handle, at_s = self._sent.popleft()
            if (request_id := self._started.pop(handle, None)) is not None:
                sent[request_id] = self.seconds(at_s)
        return {"arrived": arrived, "first": first, "sent": sent}

    def seconds(self, at_s: float) -> float:
        """A monotonic time, as the trace tells it."""
        return round(at_s - self._zero_s, 6)

    def _arrival(
        self, request: Request, at_s: float, leader: str | None, has_priorities: bool
    ) -> dict[str, Any]:
        arrival = {
            "id": request.request_id,
            "session": request.client,
            "priority": request.priority if has_priorities else 0,
            "prompt_tokens": request.num_submitted_tokens,
            "received_s": self.seconds(request.received_s or at_s),
            "arrived_s": self.seconds(at_s),
        }
        if request.compiled_s is not None:
            arrival["compiled_s"] = self.seconds(request.compiled_s)
        if leader is not None:
            arrival["leader"] = leader
        return arrival
