"""The step trace: one line of JSON per step, which is how users and tests see into the scheduler.

Keys are stable. `scheduled` and `computed` are by request id, as clients named their requests, with
"#i" for the i-th sample of one; two sessions that use one id at the same time share an entry. A
file that takes no more lines, because its disk is full for example, costs the rest of the trace and
nothing else.
"""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from typing import Any, Literal

import msgspec

from nanocore.engine_core.requests.request import Request
from nanocore.engine_core.scheduling.outputs import ClientOutput
from nanocore.engine_core.scheduling.scheduler import Scheduler
from nanocore.engine_core.traced_requests import TracedRequests
from nanocore.protocol.errors import ConfigError

logger = logging.getLogger(__name__)


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
        """Of steps in flight."""

    def arrived(self, request: Request) -> None:
        """The scheduler has a request from now on."""
        self._requests.arrived(request)

    def sent(self, output: ClientOutput) -> None:
        """An output is handed to its socket now; on the io thread."""
        self._requests.sent(output)

    def begin(self, scheduler: Scheduler) -> None:
        """After `schedule`: what is planned."""
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
        """After `update`: what came of it. The file is complete up to this step."""
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
        """Close the file. Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _write(self, data: bytes) -> None:
        """Append a line; the first one that cannot be written whole is the end of the trace."""
        if self._fd < 0:
            return
        try:
            while data:
                data = data[os.write(self._fd, data) :]
        except OSError as error:
            logger.error(
                "--step-trace %s: %s; the engine goes on without it", self._path, error.strerror
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
