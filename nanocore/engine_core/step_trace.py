"""The step trace: one line of JSON per step, which is how users and tests see into the scheduler.

Keys are stable. `scheduled` and `computed` are by request id, as clients named their requests; two
sessions that use one id at the same time share an entry.
"""

from __future__ import annotations

import time
from collections import deque
from pathlib import Path
from typing import Any

import msgspec

from nanocore.engine_core.scheduler import Scheduler


class StepTrace:
    """Appends the steps of one engine to a file."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("ab")
        self._encoder = msgspec.json.Encoder()
        self._zero_s = time.monotonic()
        self._lines: deque[dict[str, Any]] = deque()
        """Of steps in flight."""

    def begin(self, scheduler: Scheduler) -> None:
        """After `schedule`: what is planned."""
        step, table = scheduler.planned, scheduler.table
        chunks = [(table.request(chunk.row).request_id, chunk) for chunk in step.scheduled()]
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
        self._file.write(self._encoder.encode(line) + b"\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()
