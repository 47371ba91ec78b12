"""Who is first in line behind a step, and what it lacks; the step trace says it of those who wait.

It looks and changes nothing: nobody's turn comes by it.
"""

from __future__ import annotations

from typing import Literal

from nanocore.engine_core.scheduling.request import Request
from nanocore.engine_core.scheduling.scheduler import Scheduler

Shortage = Literal["rows", "stage", "budget", "kv_blocks", "partial_prefills"]
"""A row; a step of another pipeline stage's rows, which have their share of requests equally; token
budget; KV blocks; or that fewer prompts are in chunks (`max_num_partial_prefills`)."""


def first_in_line(scheduler: Scheduler) -> tuple[Request, Shortage] | None:
    """Of those that the step planned last left waiting; right after `schedule`."""
    plan, head = scheduler.planned, scheduler.waiting.peek()
    if head is None:
        return None
    if scheduler.num_admissible(plan.group) <= 0:
        is_full = scheduler.num_running >= scheduler.config.max_num_seqs
        return head, "rows" if is_full else "stage"
    if plan.num_tokens >= plan.token_budget:
        return head, "budget"
    is_short = bool(plan.preempted) or scheduler.running.is_short_of_blocks
    if is_short or scheduler.is_still_blocked(head):
        return head, "kv_blocks"
    return head, "partial_prefills"
