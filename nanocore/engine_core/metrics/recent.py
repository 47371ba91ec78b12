"""What steps and requests have done lately, for who wants to see it.

Belongs to the io thread. It keeps what was noted of the last steps and ends, and looks at requests
that are open only when it is asked: their ways are with them. So it takes as much memory whether
anybody looks or not. The step loop goes on meanwhile; what is told may differ by what it did.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Final

from nanocore.engine_core.requests.request import Request
from nanocore.engine_core.requests.step_log import EndedRequest, StepEntry
from nanocore.engine_core.scheduling.scheduler import Scheduler
from nanocore.protocol.metrics import Stats
from nanocore.protocol.steps import RecentSteps, RequestWay, StepColumns

MAX_STEPS: Final = 512
MAX_OPEN: Final = 256
MAX_ENDED: Final = 64


class Recent:
    """Of one engine. steps, ended: the last ones, which the collector adds to."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self.steps: deque[StepEntry] = deque(maxlen=MAX_STEPS)
        self.ended: deque[EndedRequest] = deque(maxlen=MAX_ENDED)

    def tell(
        self, after: int, client: int, open_requests: Sequence[Request], stats: Stats
    ) -> RecentSteps:
        """Steps with numbers above `after`, and requests, whose ids only their own client gets.

        open_requests: as they came; of many those that run, and then the newest.
        """
        ways = {one.handle: _ended_way(one, client) for one in self.ended}
        for request in _most_telling(open_requests):
            if request.handle not in ways:
                ways[request.handle] = self._open_way(request, client)
        return RecentSteps(
            now_s=self._scheduler.clock(),
            stats=stats,
            steps=self._columns([step for step in self.steps if step.number > after]),
            requests=list(ways.values()),
        )

    def _columns(self, steps: Sequence[StepEntry]) -> StepColumns:
        num_blocks = self._scheduler.kv_cache.num_blocks
        return StepColumns(
            number=[step.number for step in steps],
            ended_s=[step.ended_s for step in steps],
            duration_s=[step.duration_s for step in steps],
            num_decode_tokens=[step.num_decode_tokens for step in steps],
            num_prefill_tokens=[step.num_prefill_tokens for step in steps],
            num_running=[step.num_running for step in steps],
            num_waiting=[step.num_waiting for step in steps],
            num_used_blocks=[num_blocks - step.num_free_blocks for step in steps],
            num_preempted=[step.num_preempted for step in steps],
        )

    def _open_way(self, request: Request, client: int) -> RequestWay:
        num_outputs = self._num_tokens(request) - request.num_submitted_tokens
        return RequestWay(
            handle=request.handle,
            num_prompt_tokens=request.num_prompt_tokens,
            num_cached_tokens=request.num_cached_tokens or 0,
            num_output_tokens=max(num_outputs, 0),
            way=list(request.times.phases),
            request_id=request.client_request_id if request.client == client else "",
        )

    def _num_tokens(self, request: Request) -> int:
        """Of a request, wherever it is: its row may be taken from it at any moment."""
        row = request.row
        if row >= 0:
            num_tokens = int(self._scheduler.running.table.num_tokens[row])
            if request.row == row:
                return num_tokens
        token_ids = request.token_ids
        return request.times.num_tokens if token_ids is None else len(token_ids)


def _most_telling(requests: Sequence[Request]) -> Sequence[Request]:
    if len(requests) <= MAX_OPEN:
        return requests
    is_running = {one.handle for one in requests if one.row >= 0}
    running = [one for one in requests if one.handle in is_running]
    waiting = [one for one in requests if one.handle not in is_running]
    return [*waiting, *running][-MAX_OPEN:]


def _ended_way(ended: EndedRequest, client: int) -> RequestWay:
    return RequestWay(
        handle=ended.handle,
        num_prompt_tokens=ended.num_prompt_tokens,
        num_cached_tokens=ended.num_cached_tokens,
        num_output_tokens=ended.num_output_tokens,
        way=list(ended.times.phases),
        request_id=ended.request_id if ended.client == client else "",
        finish_reason=ended.reason,
    )
