"""The limit of the waiting queue: overload is answered at SUBMIT, in milliseconds.

An unbounded queue turns overload into timeouts for everybody. The io thread asks before it accepts
a request; the step loop says, by its counters, how much has left the queue. Each side writes only
its own numbers, so no lock is needed. From the same counters comes when there will be room.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Final, TypeAlias

from nanocore.engine_core.io.outflow import Outflow
from nanocore.engine_core.requests.step_log import SchedulerCounters
from nanocore.protocol.errors import EngineOverloadedError

_PATIENCE_S: Final = 1.0
_Quantities: TypeAlias = tuple[int, int, int]
"""Requests, tokens, bytes."""


class QueueLimit:
    """Counts requests into the queue.

    Args:
        max_num_queued_reqs, max_num_queued_tokens, max_num_queued_bytes: requests, the tokens that
            they come with, and the memory that they hold, that may wait for their first step. One
            request may always wait, however large it is and however many samples it has; and one
            of each session, while all together hold no more memory: what others have queued may
            delay who has nothing here, and not keep him out.
        counters: the scheduler's. clock: monotonic, in seconds.
    """

    def __init__(
        self,
        max_num_queued_reqs: int,
        max_num_queued_tokens: int,
        counters: SchedulerCounters,
        max_num_queued_bytes: int = 2**28,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.max_num_queued_reqs = max_num_queued_reqs
        self.max_num_queued_tokens = max_num_queued_tokens
        self.max_num_queued_bytes = max_num_queued_bytes
        self.rejections = {
            "max_num_queued_reqs": 0,
            "max_num_queued_tokens": 0,
            "max_num_queued_bytes": 0,
        }
        """Requests that were refused, by the limit."""
        self._counters = counters
        self._clock = clock
        self._num_reqs = 0
        self._num_tokens = 0
        self._num_bytes = 0
        self._outflow = Outflow(3)
        self._sent_away: OrderedDict[int, float] = OrderedDict()  # sessions, and until when

    def enter(
        self,
        num_tokens: int,
        num_samples: int = 1,
        num_bytes: int = 0,
        client: int = 0,
        is_only: bool = False,
    ) -> None:
        """Count a request in: each of its samples is one, and they have one prompt.

        num_tokens: of its prompt, and outputs that it brings. client: whose it is. is_only: its
        session has no other, waiting or running.

        Raises:
            EngineOverloadedError: the queue is full; nothing was counted. When there will be room,
                it says, is when enough has left for this request, and for one of each other session
                that was sent away and is expected back.
        """
        gone = self._counters
        totals = gone.dequeued_reqs, gone.dequeued_tokens, gone.dequeued_bytes
        reqs, tokens, held = self._num_reqs, self._num_tokens, self._num_bytes
        waiting = reqs - totals[0], tokens - totals[1], held - totals[2]
        now_s = self._clock()
        self._outflow.observe(now_s, totals, is_empty=not waiting[0])
        more = num_samples, num_tokens, num_bytes
        found = self._problem(waiting, more, may_exceed=is_only and num_samples == 1)
        if found is not None:
            limit, problem = found
            self.rejections[limit] += 1
            retry_s = self._retry_after_s(waiting, more, client, now_s)
            raise EngineOverloadedError(
                f"the engine is overloaded: {problem}; try again in {retry_s:.2g} s", retry_s
            )
        self._sent_away.pop(client, None)
        self._num_reqs += num_samples
        self._num_tokens += num_tokens
        self._num_bytes += num_bytes

    def leave(self, num_tokens: int, num_samples: int, num_bytes: int = 0) -> None:
        """Take back what `enter` counted, of a request that the step loop does not get."""
        self._num_reqs -= num_samples
        self._num_tokens -= num_tokens
        self._num_bytes -= num_bytes

    def _problem(
        self, waiting: _Quantities, more: _Quantities, may_exceed: bool
    ) -> tuple[str, str] | None:
        """(the limit, why) if so much more may not wait. may_exceed: all limits but the bytes'."""
        reqs, tokens, held = waiting
        num_samples, num_tokens, num_bytes = more
        if not reqs:
            return None
        if reqs + num_samples > self.max_num_queued_reqs and not may_exceed:
            samples = "" if num_samples == 1 else f"; here come {num_samples} samples more"
            return "max_num_queued_reqs", (
                f"{reqs} requests wait, and at most {self.max_num_queued_reqs} may "
                f"(--max-num-queued-reqs){samples}"
            )
        if tokens + num_tokens > self.max_num_queued_tokens and not may_exceed:
            return "max_num_queued_tokens", (
                f"requests of {tokens} prompt tokens wait; with {num_tokens} more they "
                f"would be over {self.max_num_queued_tokens} (--max-num-queued-tokens)"
            )
        if held + num_bytes > self.max_num_queued_bytes:
            return "max_num_queued_bytes", (
                f"requests that wait hold {held} bytes; with {num_bytes} more they would be "
                f"over {self.max_num_queued_bytes} (--max-num-queued-bytes)"
            )
        return None

    def _retry_after_s(
        self, waiting: _Quantities, more: _Quantities, client: int, now_s: float
    ) -> float:
        """When there will be room. The session is expected back then, and for a little while."""
        self._sent_away.pop(client, None)
        while self._sent_away and next(iter(self._sent_away.values())) < now_s:
            self._sent_away.popitem(last=False)
        limits = self.max_num_queued_reqs, self.max_num_queued_tokens, self.max_num_queued_bytes
        # What would never fit comes in when nobody waits.
        over = [
            min(now + n - limit, now) for now, n, limit in zip(waiting, more, limits, strict=True)
        ]
        over[0] = max(over[0], 1) + len(self._sent_away)
        retry_s = self._outflow.retry_after_s(over)
        self._sent_away[client] = now_s + retry_s + _PATIENCE_S
        return retry_s
