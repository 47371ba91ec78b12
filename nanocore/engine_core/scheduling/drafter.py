"""Drafts of a step: tokens that decodes compute behind their own, to be verified by the worker.

A draft decides how many tokens a row may get in a step, never which: the worker samples behind each
draft what it would have sampled without, and a draft counts if that is the same. So drafts are
given what is left when everybody has a token: of the budget, and of the blocks.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Final

import numpy as np

from nanocore.engine_core.drafting.proposer import FORCED, Proposals, Proposer
from nanocore.engine_core.log.event_log import DraftCounters
from nanocore.engine_core.policy.draft_budget import DraftBudget
from nanocore.engine_core.scheduling.columns import IntArray
from nanocore.engine_core.scheduling.running_set import RunningSet
from nanocore.engine_core.scheduling.step_plan import StepOutcome, StepPlan
from nanocore.kv_cache import KVCacheManager
from nanocore.worker.config.speculative_config import step_drafts

_MAX_QUIET: Final = 16
_REST: Final = 4
_FIRST_PLACE: Final = 32
"""Evidence of a model's first draft."""


class Drafter:
    """Gives the decodes of a step their drafts, and learns what became of them.

    Args:
        max_drafts: of a row in a step. is_adaptive: see `DraftBudget`. running: its rows.
        kv_cache: of these. counters: of drafts.
        proposer: of drafts; None: workers propose them, as many as a plan asks for.
    """

    def __init__(
        self,
        max_drafts: int,
        is_adaptive: bool,
        running: RunningSet,
        kv_cache: KVCacheManager,
        counters: DraftCounters,
        proposer: Proposer | None = None,
    ) -> None:
        self._max_drafts = max_drafts
        self._running = running
        self._kv_cache = kv_cache
        self._counters = counters
        self._proposer = proposer
        num_rows = len(running.requests)
        most, has_passes = step_drafts(num_rows, max_drafts), proposer is None
        self.budget = DraftBudget(num_rows, most, is_adaptive, has_passes)
        # Steps since drafts last paid. After some, only each fourth step looks for them: text that
        # does not repeat itself should not pay some microseconds for each token.
        self._num_quiet = 0
        # What a worker will propose is known by its place only. A model's guess is likelier than
        # a short match: the prior of these classes says so.
        places = _FIRST_PLACE + np.arange(max_drafts).clip(max=FORCED - 1 - _FIRST_PLACE)
        self._places = np.tile(places.astype(np.uint8), (num_rows, 1))

    def begin(self, row: int, salt: Hashable) -> None:
        """Follow a request that takes a row."""
        self.budget.begin(row)
        self._num_quiet = 0
        if self._proposer is not None:
            self._proposer.begin(row, salt)

    def end(self, row: int, num_prompt: int, num_tokens: int, has_finished: bool) -> None:
        """Forget a row, whose tokens are still in the table; preempted: not finished."""
        if self._proposer is not None:
            self._proposer.end(row, num_prompt, num_tokens, has_finished)

    def draft(self, plan: StepPlan, budget: int) -> None:
        """Plan drafts within the budget, behind the tokens of the plan's decodes."""
        running, rows = self._running, plan.decoding
        self._num_quiet += 1
        is_resting = self._num_quiet > _MAX_QUIET and self._num_quiet % _REST
        if is_resting or not (len(rows) and budget):
            return
        most = np.minimum(self._max_drafts, running.max_computed[rows] - plan.decode_ends)
        structured = np.isin(rows, list(running.matchers)).nonzero()[0].tolist()
        if self._proposer is None:
            most[structured] = 0  # masks behind drafts need their tokens
            proposals = Proposals(most, np.zeros((0, 0), np.int32), self._places[: len(rows)])
        else:
            proposals = self._proposer.propose(rows, running.num_tokens[rows], most)
            for i in structured:
                self._follow_grammar(int(rows[i]), proposals, i, int(most[i]))
            if proposals.counts.any():
                self._cut_at_stops(proposals)
        if not proposals.counts.any():
            return
        context = int(plan.decode_ends.sum())
        chosen = self.budget.choose(rows, proposals, budget, plan.num_tokens, context)
        if not chosen.any():
            return
        self._num_quiet = 0
        counts = self._plan(plan, chosen)
        plan.draft_evidence = proposals.evidence.copy()  # the proposer writes the next ones there
        if self._proposer is None:
            return
        is_draft = np.arange(proposals.token_ids.shape[1]) < counts[:, None]
        plan.draft_token_ids = proposals.token_ids[is_draft]
        plan.masked_drafts = {
            int(rows[i]): proposals.token_ids[i, : counts[i]].tolist() for i in structured
        }

    def learn(self, outcome: StepOutcome, seconds: float) -> None:
        """Learn from a step's result, and from the time that it took."""
        plan = outcome.plan
        counts = plan.decode_counts
        counts = None if counts is None else counts - 1
        if len(plan.decoding) and not plan.chunks:
            context = int(plan.decode_ends.sum())
            self.budget.observe(len(plan.decoding), counts, context, seconds)
        if counts is None or outcome.num_sampled is None:
            return
        right = outcome.num_sampled - 1
        known = (counts > 0) & (right >= 0)
        if not known.any():
            return
        counts, right = counts[known], right[known]
        self._counters.count(counts, right)
        self.budget.learn(plan.decoding[known], plan.draft_evidence[known], counts, right)

    def _follow_grammar(self, row: int, proposals: Proposals, i: int, most: int) -> None:
        """Keep of a row's proposals what its grammar lets follow, and add what that forces."""
        own = proposals.token_ids[i]
        proposed = own[: proposals.counts[i]].tolist()
        drafts = self._running.matchers[row].draft(proposed, most)
        kept = sum(1 for one, other in zip(drafts, proposed, strict=False) if one == other)
        proposals.evidence[i, kept:] = FORCED
        proposals.counts[i] = len(drafts)
        own[: len(drafts)] = drafts

    def _plan(self, plan: StepPlan, most: IntArray) -> IntArray:
        """Let the plan's decodes compute drafts behind their tokens, as many as these at most.

        Drafts get no block while each row could want one, and none beside one that their row got
        in this plan. Returns how many each of the plan's decodes gets.
        """
        running, rows, before = self._running, plan.decoding, plan.decode_ends
        num_needed = len(running) * plan.num_cache_groups
        ends = before + most
        for i in (ends > running.held_tokens[rows]).nonzero()[0].tolist():
            row, end = int(rows[i]), int(ends[i])
            may_grow = row not in plan.blocks and self._kv_cache.num_free_blocks > num_needed
            if not (may_grow and running.provide(plan, row, int(before[i]) - 1, end)):
                ends[i] = min(end, running.held_tokens[row])
        counts: IntArray = ends - before
        if counts.any():
            plan.decode_ends, plan.decode_counts = ends, counts + 1
            running.num_computed[rows] = ends
            # The result decides whether these reach their length.
            plan.last += rows[(counts > 0) & (ends == running.max_computed[rows])].tolist()
        return counts

    def _cut_at_stops(self, proposals: Proposals) -> None:
        """Keep drafts before a stop id: what follows one is never delivered."""
        is_stop = self._running.stop_ids.counts_of(proposals.token_ids) > 0
        is_stop &= np.arange(is_stop.shape[1]) < proposals.counts[:, None]
        if is_stop.any():
            first = np.where(is_stop.any(axis=1), is_stop.argmax(axis=1), is_stop.shape[1])
            np.minimum(proposals.counts, first, out=proposals.counts)
