"""Preemption: a running request loses its row and blocks, and is recomputed later.

There are two kinds. When a running row needs a block and none is free, the last running request by
precedence goes, which may be the row's own (`make_room`). Under the priority policy a waiting
request of high priority need not wait until somebody finishes: it takes the rows and blocks of
running requests of lower priority (`preempt_for`).

Who goes is decided in `policy/order.py`; what they lose and what that brings is decided here.
"""

from __future__ import annotations

from nanocore.engine_core.config import SchedulerConfig
from nanocore.engine_core.policy.order import (
    Precedence,
    PrecedenceKey,
    PriorityVictims,
    last_of,
)
from nanocore.engine_core.requests.request import Request
from nanocore.engine_core.scheduling.room import NO_SHORTAGE, BlockShortage, Room
from nanocore.engine_core.scheduling.running_set import RunningSet
from nanocore.engine_core.scheduling.step_plan import StepPlan, chunk_limit
from nanocore.kv_cache import KVCacheManager, Prefix


class Preempter:
    """Both kinds. A request is preempted by priority only for one of its own group of rows."""

    def __init__(
        self,
        config: SchedulerConfig,
        kv_cache: KVCacheManager,
        precedence: PrecedenceKey,
        running: RunningSet,
        room: Room,
    ) -> None:
        self._config = config
        self._kv_cache = kv_cache
        self._precedence = precedence
        self._running = running
        self._room = room
        num_victims = config.num_groups if config.policy == "priority" else 0
        self._victims = [PriorityVictims(precedence) for _ in range(num_victims)]  # by group
        # By group: a head for which priority preemption could not free enough.
        self._failed: dict[int, BlockShortage] = {}

    def admitted(self, request: Request) -> None:
        if self._victims:
            self._victims[request.row % len(self._victims)].add(request)

    def removed(self, request: Request) -> None:
        """Forget a request that ended or was preempted; its row may be gone already."""
        for victims in self._victims:
            victims.discard(request)

    def make_room(self, plan: StepPlan, row: int, num_tokens: int) -> None:
        """Stall a running row if blocks are about to be released; else preempt somebody for it.

        Blocks come back soon from fences, which end with steps in flight, and from rows that only
        wait for their last token. If these suffice, a step's wait is cheaper than recomputing a
        request. If not, the last running request by precedence is preempted, of any group; that may
        be this row. With steps in flight its blocks are fenced, too: the next pass stalls this row,
        and a later plan gives it the blocks. Both sums are upper bounds, since blocks may be shared
        and others wait for them. A row that stalled in vain is decided on again in its group's next
        plan; with nothing in flight there are neither, so somebody is preempted.
        """
        running, request = self._running, self._running.request(row)
        finishing = [running.request(other).handle for other in running.finishing]
        if self._kv_cache.can_allocate(
            request.handle, num_tokens, released=finishing, with_fenced=True
        ):
            plan.stalled.add(row)
            return
        # A request's cost is the tokens that it computed itself: those it found in the prefix cache
        # it will probably find again. Those that only wait for their last token are left alone:
        # they release their blocks by themselves.
        costs = running.num_computed - running.num_cached
        last = last_of(
            ((one, int(costs[one.row])) for one in running if one.row not in running.finishing),
            self._precedence,
        )
        # The plan must forget the row: it was given blocks or stalled in an earlier pass. A stalled
        # row that no request owns would never leave `_stalled`, and nobody would be admitted again.
        plan.blocks.pop(last.row, None)
        plan.stalled.discard(last.row)
        self._preempt(plan, last, request)

    def preempt_for(
        self, plan: StepPlan, head: Request, num_requests: int
    ) -> tuple[Precedence, int] | None:
        """Preempt lower priorities for the head of the queue, as many as let it be admitted.

        Its prompt is then computed before the rest of theirs. With steps in flight the victims'
        blocks are fenced: then the head is admitted by a later step, and until then `_failed` stays
        as it is, so this is tried again.

        num_requests: running ones and all that may run.
        Returns (precedence, tokens) to reserve of the budget for the head, if it will be admitted.
        """
        group, room = plan.group, self._room
        if not (self._victims and self._victims[group].may_preempt_for(head)):
            return None
        failed = self._failed.get(group, NO_SHORTAGE)
        is_same = failed.num_free_blocks == self._kv_cache.num_free_blocks
        if is_same and failed.persists(self._kv_cache, head):
            return None
        prefix, num_uncached = room.find_prefix(head)
        count = min(num_uncached, chunk_limit(self._config, (), head, ()))

        def has_row() -> bool:
            return room.num_rows(group, num_requests) > 0

        def will_fit() -> bool:
            # Blocks that steps in flight will release count as free, because waiting a step for
            # them is cheaper than recomputing a request.
            return has_row() and room.fits(head, prefix, with_fenced=True)

        victims = [] if will_fit() else self._suitable_victims(group, head, prefix)
        for one in victims:
            self._preempt(plan, one, head)
            if will_fit():
                break
        is_admitted = has_row() and room.fits(head, prefix)
        if not (victims or is_admitted):
            self._failed[group] = BlockShortage.of(self._kv_cache, head, prefix)
        return (self._precedence(head), count) if is_admitted else None

    def _suitable_victims(self, group: int, head: Request, prefix: Prefix) -> list[Request]:
        """Return whom to preempt for the head, one after the other; nobody if it is no use."""
        victims = self._victims[group].of(head)
        if any(one.row in self._running.finishing for one in victims):
            return []  # its row and blocks are free in a step
        # All or nothing: preempting some without admitting the head would only waste work.
        handles = [one.handle for one in victims]
        return victims if self._room.fits(head, prefix, handles, with_fenced=True) else []

    def _preempt(self, plan: StepPlan, request: Request, preempter: Request) -> None:
        plan.preempt(request, preempter)
        self.removed(request)
        self._running.preempt(request)
