"""The step trace: one line of JSON per step, which shows what the scheduler did.

Keys are stable. `scheduled` and `computed` are by request id, as clients named their requests, with
"#i" for the i-th sample of one; two sessions that use one id at the same time share an entry. A
file that takes no more lines, because its disk is full for example, ends the trace and nothing
else.
"""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from typing import Any, Literal

import msgspec
import numpy as np

from nanocore.engine_core.requests.request import TOKEN_DTYPE, Request
from nanocore.engine_core.scheduling.outputs import ClientOutput
from nanocore.engine_core.scheduling.scheduler import Scheduler
from nanocore.protocol.errors import ConfigError

logger = logging.getLogger(__name__)


class TracedRequests:
    """Requests in the step trace: arrivals, sent outputs, and origins of cached blocks.

    Arrivals and sent outputs belong to no step; they wait here for the next line. For each KV block
    it keeps the request that it was allocated for last, so that a hit names who computed it. The
    step loop's thread owns it; only `sent` is called from the io thread, and appends to a deque.

    zero_s: monotonic time from which times count.
    """

    def __init__(self, zero_s: float) -> None:
        self._zero_s = zero_s
        self._arrived: list[tuple[Request, float, str | None]] = []  # when, behind which leader
        self._ids: dict[int, str] = {}  # by handle, until its first token
        self._started: dict[int, str] = {}  # likewise, from then until that is sent
        self._sent: deque[tuple[int, float]] = deque()  # (handle, when)
        self._block_owners: dict[int, str] = {}  # id of a request, by block

    def arrived(self, request: Request) -> None:
        """Note a request that was given to the scheduler, with its sibling samples."""
        now_s = time.monotonic()
        for sample in request.samples:
            self._ids[sample.handle] = sample.request_id
            leader = None if sample.awaited_sibling is None else sample.awaited_sibling.request_id
            self._arrived.append((sample, now_s, leader))

    def sent(self, output: ClientOutput) -> None:
        """Note the first tokens in an output that is being sent. For the io thread."""
        if output.events:
            now_s = time.monotonic()
            started = [one.handle for one in output.events if one.num_cached_tokens is not None]
            self._sent.extend((handle, now_s) for handle in started)

    def hits(self, scheduler: Scheduler) -> dict[str, list[str]]:
        """Return, for each admitted request, the requests that computed its cached blocks, in
        order.
        """
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
        """Return what has come since the last line. Call after a step's update."""
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
        """Convert a monotonic time to the trace's."""
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


class StepTrace:
    """Appends the steps of one engine to a file.

    Raises:
        ConfigError: it cannot be opened.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        # A pipe that nobody reads is refused by the system, and one that is read slowly never
        # keeps a step waiting.
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK
        try:
            self._fd = os.open(path, flags, 0o666)
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise ConfigError(
                f"--step-trace {path}: {reason}; name a file that can be written, or leave it out"
            ) from None
        self._encoder = msgspec.json.Encoder()
        self._zero_s = time.monotonic()
        self._requests = TracedRequests(self._zero_s)
        self._lines: deque[dict[str, Any]] = deque()
        """Lines of steps in flight."""

    def arrived(self, request: Request) -> None:
        self._requests.arrived(request)

    def sent(self, output: ClientOutput) -> None:
        """Note an output that is being sent. For the io thread."""
        self._requests.sent(output)

    def begin(self, scheduler: Scheduler) -> None:
        """Begin a step's line, after `schedule`."""
        step, running = scheduler.planned, scheduler.running
        chunks = [
            (running.table.request(chunk.row).request_id, chunk) for chunk in step.scheduled()
        ]
        head = blocked_head(scheduler)
        blocked = head and {"id": head[0].request_id, "by": head[1]}
        line = {
            "step": step.number,
            "t_s": round(time.monotonic() - self._zero_s, 6),
            "duration_ms": 0.0,
            "scheduled": {request_id: chunk.num_tokens for request_id, chunk in chunks},
            "computed": {request_id: chunk.num_computed for request_id, chunk in chunks},
            "new": [request.request_id for request in step.new],
            "resumed": [request.request_id for request in step.resumed],
            "preempted": [request.request_id for request in step.preempted],
            "cached": step.cached,
            "token_budget": step.token_budget,
            "cached_from": self._requests.hits(scheduler),
            "preempted_by": step.preempters,
            "blocked": blocked,
        }
        self._lines.append(line)

    def end(self, scheduler: Scheduler) -> None:
        """Complete and write a step's line, after `update`."""
        line = self._lines.popleft()
        elapsed_s = time.monotonic() - self._zero_s - line["t_s"]
        line |= {
            "duration_ms": round(elapsed_s * 1e3, 3),
            "finished": [request.request_id for request in scheduler.completed.finished],
            "num_running": scheduler.num_running,
            "num_waiting": scheduler.num_waiting,
            "free_blocks": scheduler.kv_cache.num_free_blocks,
            "total_blocks": scheduler.kv_cache.num_blocks,
        }
        line |= self._requests.take(scheduler)
        self._write(self._encoder.encode(line) + b"\n")

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _write(self, data: bytes) -> None:
        """Append a line; the first one that cannot be written whole ends the trace."""
        if self._fd < 0:
            return
        try:
            while data:
                data = data[os.write(self._fd, data) :]
        except OSError as error:
            logger.error(
                "--step-trace %s: %s; the engine continues without it", self._path, error.strerror
            )
            self.close()


MissingResource = Literal["rows", "stage", "budget", "kv_blocks", "partial_prefills"]
"""What the head of the queue waits for: a row; a row of another pipeline group, which has its share
of requests; token budget; KV blocks; or the partial-prefill limit."""


def blocked_head(scheduler: Scheduler) -> tuple[Request, MissingResource] | None:
    """Return the request that the planned step left at the head, and what it waits for.

    For the step trace, right after `schedule`. It changes nothing: no turn advances.
    """
    plan, head = scheduler.planned, scheduler.waiting.peek()
    if head is None:
        return None
    if scheduler.num_admissible(plan.group) <= 0:
        is_full = scheduler.num_running >= scheduler.config.max_num_seqs
        return head, "rows" if is_full else "stage"
    if plan.num_tokens >= plan.token_budget:
        return head, "budget"
    is_short = bool(plan.preempted) or scheduler.running.is_short_of_blocks
    if is_short or scheduler.is_still_blocked(head):
        return head, "kv_blocks"
    return head, "partial_prefills"
