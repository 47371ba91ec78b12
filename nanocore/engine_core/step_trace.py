"""The step trace: one line of JSON per step, which is how users and tests see into the scheduler.

Keys are stable. `scheduled` and `computed` are by request id, as clients named their requests; two
sessions that use one id at the same time share an entry.
"""

from __future__ import annotations

import time
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
        self._line: dict[str, Any] = {}

    def begin(self, scheduler: Scheduler) -> None:
        """After `schedule`: what is planned."""
        record, table = scheduler.record, scheduler.table
        ids = [table.request(row).request_id for row in record.rows.tolist()]
        self._line = {
            "step": scheduler.counters.num_steps,
            "t_s": round(time.monotonic() - self._zero_s, 6),
            "duration_ms": 0.0,
            "scheduled": dict(zip(ids, record.counts.tolist(), strict=True)),
            "computed": dict(zip(ids, record.computed_before.tolist(), strict=True)),
            "new": [request.request_id for request in record.new],
            "resumed": [request.request_id for request in record.resumed],
            "preempted": [request.request_id for request in record.preempted],
            "cached": record.cached,
            "token_budget": scheduler.config.max_num_batched_tokens,
        }

    def end(self, scheduler: Scheduler) -> None:
        """After `update`: what came of it. The file is complete up to this step."""
        elapsed_s = time.monotonic() - self._zero_s - self._line["t_s"]
        self._line |= {
            "duration_ms": round(elapsed_s * 1e3, 3),
            "finished": [request.request_id for request in scheduler.record.finished],
            "num_running": scheduler.num_running,
            "num_waiting": len(scheduler.waiting),
            "free_blocks": scheduler.kv_cache.num_free_blocks,
            "total_blocks": scheduler.kv_cache.num_blocks,
        }
        self._file.write(self._encoder.encode(self._line) + b"\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()
