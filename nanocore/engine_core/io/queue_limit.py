"""The limit of the waiting queue: overload is answered at SUBMIT, in milliseconds.

An unbounded queue turns overload into timeouts for everybody. The io thread asks before it accepts
a request; the step loop says, by its counters, how many have left the queue. Each side writes only
its own numbers, so no lock is needed.
"""

from __future__ import annotations

from typing import Final

from nanocore.engine_core.scheduling.counters import SchedulerCounters
from nanocore.protocol.errors import EngineOverloadedError

RETRY_AFTER_S: Final = 1.0


class QueueLimit:
    """Counts requests into the queue.

    Args:
        max_num_queued_reqs, max_num_queued_tokens: requests, and their prompt tokens, that may wait
            for their first step. One request may always wait, however long it is and however many
            samples it has.
        counters: the scheduler's.
    """

    def __init__(
        self, max_num_queued_reqs: int, max_num_queued_tokens: int, counters: SchedulerCounters
    ) -> None:
        self.max_num_queued_reqs = max_num_queued_reqs
        self.max_num_queued_tokens = max_num_queued_tokens
        self._counters = counters
        self._num_reqs = 0
        self._num_tokens = 0

    def enter(self, num_prompt_tokens: int, num_samples: int = 1) -> None:
        """Count a request in: each of its samples is one, and they have one prompt.

        Raises:
            EngineOverloadedError: the queue is full; nothing was counted.
        """
        num_reqs = self._num_reqs - self._counters.dequeued_reqs
        num_tokens = self._num_tokens - self._counters.dequeued_tokens
        problem = None
        if num_reqs and num_reqs + num_samples > self.max_num_queued_reqs:
            more = "" if num_samples == 1 else f"; here come {num_samples} samples more"
            problem = (
                f"{num_reqs} requests wait, and at most {self.max_num_queued_reqs} may "
                f"(--max-num-queued-reqs){more}"
            )
        elif num_reqs and num_tokens + num_prompt_tokens > self.max_num_queued_tokens:
            problem = (
                f"requests of {num_tokens} prompt tokens wait; with {num_prompt_tokens} more they "
                f"would be over {self.max_num_queued_tokens} (--max-num-queued-tokens)"
            )
        if problem:
            raise EngineOverloadedError(
                f"the engine is overloaded: {problem}; try again in {RETRY_AFTER_S:g} s",
                RETRY_AFTER_S,
            )
        self._num_reqs += num_samples
        self._num_tokens += num_prompt_tokens

    def leave(self, num_prompt_tokens: int, num_samples: int) -> None:
        """Take back what `enter` counted, of a request that the step loop does not get."""
        self._num_reqs -= num_samples
        self._num_tokens -= num_prompt_tokens
