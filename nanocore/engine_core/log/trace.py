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

from nanocore.engine_core.log.event_log import Entry, RequestEntry, StepDone
from nanocore.engine_core.requests.request import Request
from nanocore.engine_core.scheduling.outputs import ClientOutput
from nanocore.engine_core.scheduling.scheduler import Scheduler
from nanocore.protocol.errors import ConfigError

logger = logging.getLogger(__name__)


class StepTrace:
    """Appends the steps of one engine to a file.

    A fold of the event log that takes entries at once, on the step loop's thread: it shows what was
    there when a step was planned, and an engine that is killed has written its last steps.

    Raises:
        ConfigError: the file cannot be opened.
    """

    _scheduler: Scheduler

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
        self._lines: deque[dict[str, Any]] = deque()  # of steps in flight
        # Arrivals and sent outputs belong to no step; they wait here for the next line.
        self._arrived: list[dict[str, Any]] = []
        self._started: dict[int, str] = {}  # by handle, until the first token is sent
        self._sent: deque[tuple[int, float]] = deque()  # (handle, when), from the io thread

    def attach(self, scheduler: Scheduler) -> None:
        """Trace this scheduler's steps from now on."""
        self._scheduler = scheduler
        scheduler.log.subscribe(self.take)

    def take(self, entry: Entry) -> None:
        if isinstance(entry, StepDone):
            self._end_step()
        elif isinstance(entry, RequestEntry) and entry.kind == "queued":
            self._arrived.append(self._arrival(entry.request, entry.at_s))

    def sent(self, output: ClientOutput) -> None:
        """Note the first tokens in an output that is being sent. For the io thread."""
        if output.events:
            now_s = time.monotonic()
            started = [one.handle for one in output.events if one.num_cached_tokens is not None]
            self._sent.extend((handle, now_s) for handle in started)

    def begin(self) -> None:
        """Begin a step's line, after `schedule`."""
        scheduler = self._scheduler
        step, running = scheduler.planned, scheduler.running
        chunks = [(running.request(chunk.row).request_id, chunk) for chunk in step.scheduled()]
        head = blocked_head(scheduler)
        line = {
            "step": step.number,
            "t_s": self._seconds(time.monotonic()),
            "duration_ms": 0.0,
            "scheduled": {request_id: chunk.num_tokens for request_id, chunk in chunks},
            "computed": {request_id: chunk.num_computed for request_id, chunk in chunks},
            "new": [request.request_id for request in step.new],
            "resumed": [request.request_id for request in step.resumed],
            "preempted": [request.request_id for request in step.preempted],
            "cached": step.cached,
            "token_budget": step.token_budget,
            "preempted_by": step.preempters,
            "blocked": head and {"id": head[0].request_id, "by": head[1]},
        }
        if len(scheduler.kv_cache.groups) > 1:
            line["lost"] = {
                request_id: {"tokens": num_tokens, "group": group}
                for request_id, (num_tokens, group) in step.lost.items()
            }
        if step.decode_counts is not None:  # rows may have other requests when the result is in
            decodes = chunks[: len(step.decoding)]
            line["accepted"] = [name if one.num_tokens > 1 else None for name, one in decodes]
        self._lines.append(line)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _end_step(self) -> None:
        """Complete and write the line of the step whose result came in last."""
        line, scheduler, outcome = self._lines.popleft(), self._scheduler, self._scheduler.completed
        elapsed_s = time.monotonic() - self._zero_s - line["t_s"]
        kv_cache = scheduler.kv_cache
        self._started |= {request.handle: request.request_id for request in outcome.started}
        line |= {
            "duration_ms": round(elapsed_s * 1e3, 3),
            "finished": [request.request_id for request in outcome.finished],
            "num_running": scheduler.num_running,
            "num_waiting": scheduler.num_waiting,
            "free_blocks": kv_cache.num_free_blocks,
            "total_blocks": kv_cache.num_blocks,
            "arrived": self._arrived,
            "first": [request.request_id for request in outcome.started],
            "sent": self._take_sent(),
        }
        if len(kv_cache.groups) > 1:
            line["groups"] = [
                {"name": name, "free_blocks": num_free, "total_blocks": num_blocks}
                for name, num_blocks, num_free in kv_cache.blocks_by_group
            ]
        if outcome.num_sampled is not None:
            rows = zip(line["accepted"], outcome.num_sampled.tolist(), strict=True)
            line["accepted"] = {name: num - 1 for name, num in rows if name is not None and num}
        self._arrived = []
        self._write(self._encoder.encode(line) + b"\n")

    def _take_sent(self) -> dict[str, float]:
        """Return when first tokens were sent since the last line, by request id."""
        sent = {}
        for _ in range(len(self._sent)):
            handle, at_s = self._sent.popleft()
            if (request_id := self._started.pop(handle, None)) is not None:
                sent[request_id] = self._seconds(at_s)
        return sent

    def _arrival(self, request: Request, at_s: float) -> dict[str, Any]:
        has_priorities = self._scheduler.config.policy == "priority"
        arrival = {
            "id": request.request_id,
            "session": request.client,
            "priority": request.priority if has_priorities else 0,
            "prompt_tokens": request.num_submitted_tokens,
            "received_s": self._seconds(request.received_s or at_s),
            "arrived_s": self._seconds(at_s),
        }
        if request.compiled_s is not None:
            arrival["compiled_s"] = self._seconds(request.compiled_s)
        if request.awaited_sibling is not None:
            arrival["leader"] = request.awaited_sibling.request_id
        return arrival

    def _seconds(self, at_s: float) -> float:
        """Convert a monotonic time to the trace's."""
        return round(at_s - self._zero_s, 6)

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


MissingResource = Literal["rows", "stage", "budget", "kv_blocks"]
"""What the head of the queue waits for: a row; a row of another pipeline group, which has its share
of requests; token budget; or KV blocks."""


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
    return head, "kv_blocks"
