"""The step log: what happened in each step and to each request; metrics are made from it.

Logging costs the step loop an append and no lock: it appends, one other thread takes from the left
(`engine_core/metrics/`). Times are seconds of the scheduler's clock.
"""

from __future__ import annotations

import logging
from collections import deque
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from nanocore.engine_core.requests.request import Request, RequestTimes
from nanocore.engine_core.scheduling.columns import IntArray
from nanocore.protocol.messages import Event, FinishReason

logger = logging.getLogger(__name__)


class StepEntry(msgspec.Struct, frozen=True, gc=False):
    """One step, logged when its result is in. A struct, because making one takes 0.1 µs.

    Args:
        duration_s: time since it was planned, or since the step before it ended if that is later.
        num_running, num_waiting, num_free_blocks: after the step.
    """

    number: int
    ended_s: float
    duration_s: float
    num_decode_tokens: int
    num_prefill_tokens: int
    num_running: int
    num_waiting: int
    num_free_blocks: int
    num_preempted: int

    @property
    def num_tokens(self) -> int:
        return self.num_decode_tokens + self.num_prefill_tokens


class FirstToken(NamedTuple):
    """A request that got its first token, or its embedding.

    seconds: since the engine received it; None for an embedding.
    """

    seconds: float | None
    num_cached_tokens: int


class EndedRequest(NamedTuple):
    """A request that ended, or one of several samples of it.

    Args:
        request_id: the client's id, unique in its session.
        max_tokens: limit of its output tokens.
        first_handle: handle of the request's first sample. num_samples: samples of the request.
    """

    handle: int
    client: int
    request_id: str
    reason: FinishReason
    at_s: float
    received_s: float
    times: RequestTimes
    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int
    max_tokens: int
    first_handle: int
    num_samples: int


class SchedulerCounters(msgspec.Struct):
    """Totals since the start. Each sample counts as a request.

    dequeued_*: requests that left the queue for good; their submitted tokens, and the bytes that
    they held while they waited, count once for all samples. dequeued_s: when the last one left.
    num_free_rows: rows for requests that arrive now; 0 if the last plan had none for some that
    wait. is_paused: no step is planned for now.
    """

    num_steps: int = 0
    num_preemptions: int = 0
    num_aborts: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    dequeued_reqs: int = 0
    dequeued_tokens: int = 0
    dequeued_bytes: int = 0
    dequeued_s: float = 0.0
    num_free_rows: int = 0
    is_full: bool = False
    is_paused: bool = False

    def count_rows(self, num_free: int, is_full: bool | None = None) -> None:
        """Count free rows. is_full: whether a plan has left requests waiting; None: no new plan."""
        if is_full is not None:
            self.is_full = is_full
        self.num_free_rows = 0 if self.is_full else num_free

    def count_dequeued(self, request: Request, now_s: float) -> None:
        """Count a request when it is first admitted, or when it ends before that."""
        if request.was_admitted:
            return
        # In this order, so that another thread never sees a row free that has been taken.
        self.num_free_rows = max(self.num_free_rows - 1, 0)
        self.dequeued_s = now_s
        self.dequeued_reqs += 1
        if request.sample == 0:
            self.dequeued_tokens += request.num_submitted_tokens
            self.dequeued_bytes += request.num_bytes


class StepLog(msgspec.Struct):
    """Queues of entries that nobody has taken yet.

    intervals: inter-token times, as (seconds, number of rows that share it) or one per row.
    """

    steps: deque[StepEntry] = msgspec.field(default_factory=deque)
    intervals: deque[tuple[float, int] | NDArray[np.float64]] = msgspec.field(default_factory=deque)
    first_tokens: deque[FirstToken] = msgspec.field(default_factory=deque)
    ended: deque[EndedRequest] = msgspec.field(default_factory=deque)

    def begin(self, request: Request, now_s: float) -> None:
        """Log a request's first token, or its embedding."""
        seconds = None
        if request.sampling.pooling is None:
            request.times.first_token_s = now_s
            seconds = now_s - request.received_s
        self.first_tokens.append(FirstToken(seconds, request.num_cached_tokens or 0))

    def end(self, request: Request, end: Event, now_s: float) -> None:
        """Log the end of a request that has no row any more; errors go to the log file, too."""
        assert end.finish_reason is not None
        if end.finish_reason == "error":
            about = {"request_id": request.request_id}
            logger.error("request %r failed: %s", request.request_id, end.message, extra=about)
        request.times.enter("ended", now_s)
        entry = EndedRequest(
            handle=request.handle,
            client=request.client,
            request_id=request.client_request_id,
            reason=end.finish_reason,
            at_s=now_s,
            received_s=request.received_s,
            times=request.times,
            num_prompt_tokens=request.num_prompt_tokens,
            num_output_tokens=max(request.times.num_tokens - request.num_submitted_tokens, 0),
            num_cached_tokens=request.num_cached_tokens or 0,
            max_tokens=request.max_num_tokens - request.num_prompt_tokens,
            first_handle=request.handle - request.sample,
            num_samples=request.sampling.n,
        )
        self.ended.append(entry)


class TokenTimes:
    """When each row got its last token; logs the intervals between tokens.

    While consecutive steps have tokens for the same rows, one time stands for all of them, and a
    step costs one comparison. The column is written only when rows come or go.
    """

    def __init__(self, max_num_seqs: int, step_log: StepLog) -> None:
        self._step_log = step_log
        self._column = np.zeros(max_num_seqs)
        self._rows: IntArray | None = None  # the time of these rows is `_rows_s`, not the column's
        self._rows_s = 0.0

    def stamp(self, rows: IntArray, now_s: float) -> None:
        """Record new tokens. rows: must be the same array object as long as the rows are equal."""
        if rows is self._rows:
            self._step_log.intervals.append((now_s - self._rows_s, len(rows)))
        elif len(rows):
            self._settle()
            before = self._column[rows]
            self._step_log.intervals.append(now_s - before[before > 0])
        else:
            return
        self._rows, self._rows_s = rows, now_s

    def of(self, row: int) -> float:
        """Return when the row got its last token; 0 if it has none."""
        self._settle()
        return float(self._column[row])

    def set(self, row: int, last_token_s: float) -> None:
        """Start anew for another request in this row; 0 if it has no token yet."""
        self._settle()
        self._column[row] = last_token_s

    def _settle(self) -> None:
        if self._rows is not None:
            self._column[self._rows] = self._rows_s
            self._rows = None
