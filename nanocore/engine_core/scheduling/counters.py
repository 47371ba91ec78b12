"""What the scheduler has done since the start, counted by itself."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class SchedulerCounters:
    """Totals since the start; samples are requests.

    dequeued: those that wait no more, and tokens of their prompts, of several samples once.
    """

    num_steps: int = 0
    num_preemptions: int = 0
    num_aborts: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    dequeued_reqs: int = 0
    dequeued_tokens: int = 0
