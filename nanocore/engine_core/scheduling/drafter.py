"""Drafts of a step: tokens that decodes compute behind their own, to be verified by the worker.

A draft decides how many tokens a row may get in a step, never which: the worker samples behind each
draft what it would have sampled without, and a draft counts if that is the same. So drafts are
given what is left when everybody has a token: of the budget, and of the blocks.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from nanocore.engine_core.scheduling.columns import IntArray
from nanocore.engine_core.scheduling.running_set import RunningSet
from nanocore.engine_core.scheduling.step_plan import StepPlan
from nanocore.kv_cache import KVCacheManager


class Proposals(NamedTuple):
    """Drafts of n rows: counts[i] of them, int64; token_ids: int32 [n, max_drafts]."""

    counts: NDArray[np.int64]
    token_ids: NDArray[np.int32]


class Proposer(Protocol):
    """Guesses what follows the known tokens of rows, in the engine's process."""

    def propose(self, rows: IntArray, num_tokens: IntArray, most: IntArray) -> Proposals:
        """Guess up to most[i] tokens behind the first num_tokens[i] of each row; rows distinct."""
        ...


class Drafter:
    """Gives the decodes of a step their drafts.

    Args:
        max_drafts: of a row in a step. running: its rows. kv_cache: of these.
        proposer: of drafts; None: workers propose them, as many as a plan asks for.
    """

    def __init__(
        self,
        max_drafts: int,
        running: RunningSet,
        kv_cache: KVCacheManager,
        proposer: Proposer | None = None,
    ) -> None:
        self._max_drafts = max_drafts
        self._running = running
        self._kv_cache = kv_cache
        self._proposer = proposer

    def draft(self, plan: StepPlan, budget: int) -> None:
        """Plan drafts within the budget, behind the tokens of the plan's decodes."""
        running, rows = self._running, plan.decoding
        if not (len(rows) and budget):
            return
        most = np.minimum(self._max_drafts, running.max_computed[rows] - plan.decode_ends)
        structured = np.isin(rows, list(running.matchers)).nonzero()[0].tolist()
        if self._proposer is None:
            most[structured] = 0  # masks behind drafts need their tokens
            self._plan(plan, _within(budget, most))
            return
        proposals = self._proposer.propose(rows, running.num_tokens[rows], most)
        for i in structured:
            own = proposals.token_ids[i]
            matcher = running.matchers[int(rows[i])]
            drafts = matcher.draft(own[: proposals.counts[i]].tolist(), int(most[i]))
            proposals.counts[i] = len(drafts)
            own[: len(drafts)] = drafts
        if not proposals.counts.any():
            return
        counts = self._plan(plan, _within(budget, self._before_stops(proposals)))
        is_draft = np.arange(proposals.token_ids.shape[1]) < counts[:, None]
        plan.draft_token_ids = proposals.token_ids[is_draft]
        plan.masked_drafts = {
            int(rows[i]): proposals.token_ids[i, : counts[i]].tolist() for i in structured
        }

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

    def _before_stops(self, proposals: Proposals) -> IntArray:
        """Return how many drafts come before a stop id: what follows one is never delivered."""
        is_stop = self._running.stop_ids.counts_of(proposals.token_ids) > 0
        is_stop &= np.arange(is_stop.shape[1]) < proposals.counts[:, None]
        first = np.where(is_stop.any(axis=1), is_stop.argmax(axis=1), is_stop.shape[1])
        counts: IntArray = np.minimum(proposals.counts, first)
        return counts


def _within(budget: int, wanted: IntArray) -> IntArray:
    """Return what each gets of a budget, the first ones first."""
    counts: IntArray = np.clip(budget - (wanted.cumsum() - wanted), 0, wanted)
    return counts
