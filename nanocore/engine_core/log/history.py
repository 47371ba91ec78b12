"""What became of requests and of recent steps: a fold of the event log.

The live page and `nanocore top` show it; the metrics of a request are made from its life when it
has ended. Belongs to the io thread.
"""

from __future__ import annotations

from collections import deque
from typing import Final

import msgspec

from nanocore.engine_core.log.event_log import Entries, RequestEntry
from nanocore.engine_core.requests.request import Request
from nanocore.engine_core.scheduling.scheduler import Scheduler
from nanocore.protocol.messages import FinishReason
from nanocore.protocol.metrics import (
    MAX_MOVES,
    Phase,
    RecentSteps,
    RequestPhases,
    Stats,
    StepColumns,
)

MAX_STEPS: Final = 512
MAX_OPEN: Final = 256
MAX_ENDED: Final = 64


class RequestLife(msgspec.Struct):
    """What has happened to a request, in seconds of the scheduler's clock.

    Args:
        at_s: when it reached each point for the first time, by kind of entry; once it has ended
            also "received", and "last_token" if it had a first one.
        phases: phases with the time of entering each.
        reason: why it ended.
    """

    request: Request
    at_s: dict[str, float] = msgspec.field(default_factory=dict)
    phases: list[tuple[Phase, float]] = msgspec.field(default_factory=list)
    num_preemptions: int = 0
    reason: FinishReason | None = None

    def take(self, entry: RequestEntry) -> None:
        request, kind, at_s, self.reason = self.request, entry.kind, entry.at_s, entry.reason
        self.at_s.setdefault(kind, at_s)
        if kind == "first_token" or kind == "embedding":
            return
        if kind == "queued":
            at_s = request.received_s or at_s
        elif kind == "ended":
            self.at_s["received"] = request.received_s
            if "first_token" in self.at_s:
                self.at_s["last_token"] = request.last_token_s
        self.num_preemptions += kind == "preempted"
        # A request that is preempted again and again must not grow without bound: the oldest
        # phases but the first are dropped.
        if len(self.phases) == MAX_MOVES:
            del self.phases[1]
        self.phases.append((kind, at_s))

    def report(self, num_tokens: int) -> RequestPhases:
        """Return what the request's own client may see. num_tokens: prompt and output tokens."""
        request = self.request
        return RequestPhases(
            handle=request.handle,
            num_prompt_tokens=request.num_prompt_tokens,
            num_cached_tokens=request.num_cached_tokens or 0,
            num_output_tokens=max(num_tokens - request.num_submitted_tokens, 0),
            way=list(self.phases),
            request_id=request.client_request_id,
            finish_reason=self.reason,
        )


class History:
    """Recent steps, the open requests, and those that ended lately.

    Memory does not depend on readers. The step loop goes on meanwhile; a report may differ by the
    current step.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        # In the order of StepColumns; an entry's own columns would take far more memory.
        self.steps: deque[tuple[float, ...]] = deque(maxlen=MAX_STEPS)
        self.open: dict[int, RequestLife] = {}  # by handle, as they came
        self.ended: deque[tuple[int, RequestPhases]] = deque(maxlen=MAX_ENDED)  # (client, what)

    def take(self, entries: Entries) -> list[RequestLife]:
        """Add entries; returns the lives of requests that ended."""
        num_blocks = self._scheduler.kv_cache.num_blocks
        for step in entries.steps:
            numbers = (
                step.number, step.ended_s, step.duration_s, step.num_decode_tokens,
                step.num_prefill_tokens, step.num_running, step.num_waiting,
                num_blocks - step.num_free_blocks, step.num_preempted,
            )  # fmt: skip
            self.steps.append(numbers)
        ended = []
        for entry in entries.requests:
            request = entry.request
            if (life := self.open.get(request.handle)) is None:
                life = self.open[request.handle] = RequestLife(request)
            life.take(entry)
            if entry.kind == "ended":
                ended.append(self.open.pop(request.handle))
                self.ended.append((request.client, life.report(request.last_num_tokens)))
        return ended

    def report(self, after: int, client: int, stats: Stats) -> RecentSteps:
        """Return steps with numbers above `after`, and requests; only their own client gets their
        ids. Of many open requests those that run are in it, and then the newest.
        """
        lives = list(self.open.values())
        if len(lives) > MAX_OPEN:
            lives = sorted(lives, key=lambda life: life.request.row >= 0)[-MAX_OPEN:]
        now = [(one.request.client, one.report(self._num_tokens(one.request))) for one in lives]
        steps = [step for step in self.steps if step[0] > after]
        columns = zip(StepColumns.__struct_fields__, zip(*steps, strict=True), strict=False)
        return RecentSteps(
            now_s=self._scheduler.clock(),
            stats=stats,
            steps=msgspec.convert(dict(columns), StepColumns),
            requests=[
                one if owner == client else msgspec.structs.replace(one, request_id="")
                for owner, one in [*self.ended, *now]
            ],
        )

    def _num_tokens(self, request: Request) -> int:
        """Return a request's number of tokens; its row may be taken from it at any moment."""
        row = request.row
        if row >= 0:
            num_tokens = int(self._scheduler.running.num_tokens[row])
            if request.row == row:
                return num_tokens
        token_ids = request.token_ids
        return request.last_num_tokens if token_ids is None else len(token_ids)
