"""What the scheduler has done since the start, counted by itself."""

from __future__ import annotations

from dataclasses import dataclass

from nanocore.engine_core.scheduling.request import Request


@dataclass(slots=True)
class SchedulerCounters:
    """Totals since the start; samples are requests.

    dequeued: those that wait no more; tokens that they came with, and bytes that they held while
    they waited, of several samples once.
    """

    num_steps: int = 0
    num_preemptions: int = 0
    num_aborts: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    dequeued_reqs: int = 0
    dequeued_tokens: int = 0
    dequeued_bytes: int = 0

    def count_dequeued(self, request: Request) -> None:
        """A request has left the queue; counted once, when it is first admitted or else ended."""
        if request.num_cached_tokens is not None:
            return
        self.dequeued_reqs += 1
        if request.sample == 0:
            self.dequeued_tokens += request.num_submitted_tokens
            self.dequeued_bytes += request.num_bytes
