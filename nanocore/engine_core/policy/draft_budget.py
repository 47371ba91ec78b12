"""How many drafts a step computes: as many as raise the tokens per second.

A draft counts only if it and those before it are right, so each has a chance: the product of how
often drafts with such evidence were right, which is learned, down its row. The likeliest drafts are
taken, as long as (tokens expected) / (time expected) rises; the time of a step of n tokens is
learned, too. So drafts that are rarely right, or a machine that has no time to spare because
many rows decode, end in plain decoding (SmartSpec, Liu et al. 2024, weighs the same two).
"""

from __future__ import annotations

from collections import deque
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from nanocore.engine_core.drafting.proposer import NUM_EVIDENCE, IntArray, Proposals

FloatArray = NDArray[np.float64]

_KNEES: Final = np.array([8.0, 16.0, 32.0, 64.0])
_STEPS_PER_SIZE: Final = 16
_REFIT_STEPS: Final = 32
_MAX_AGE_STEPS: Final = 2000
_SLOWNESS_RATE: Final = 0.1
_SLOWER: Final = (0.25, 4.0)
"""Most that one step changes the idea of how slow the machine is, before the rate."""

_PRIOR_RATE: Final = 0.5
_PRIOR_WEIGHT: Final = 4.0
_MIN_GAIN: Final = 1.02
"""Drafts that promise less are not worth it: both estimates have errors."""
_MEMORY: Final = 0.998
"""Factor by step of what was seen: what is not tried any more is forgotten, and tried again."""
_ROW_MEMORY: Final = 0.9
_ROW_WEIGHT: Final = 2.0


class StepTimes:
    """Time of decode steps by their tokens: a line that bends upwards, and drafts' own cost.

    No coefficient is below 0: more tokens never take less. The latest steps of each size (powers
    of two) are remembered apart, with drafts and without, and fitted to the relative error, in
    which a step that was held up weighs little. What is remembered is relative to how slow the
    machine was at that time, because others may use it, too; so times can be compared with each
    other and are no seconds. Steps of long ago are forgotten: a size that seemed too slow is tried
    again.
    """

    def __init__(self) -> None:
        self._steps: dict[tuple[int, bool], deque[tuple[float, ...]]] = {}
        self._coefficients = np.zeros(4 + len(_KNEES))
        self._slowness = 1.0
        self._num_seen = self._num_fitted = 0

    def observe(self, num_tokens: int, num_drafts: int, context: int, seconds: float) -> None:
        """Remember a step. context: over its tokens, the tokens that each attends to."""
        if seconds <= 0:
            return
        self._num_seen += 1
        has_drafts = num_drafts > 0
        tokens = np.array([num_tokens])
        usual = float(self.predict(tokens, np.array([has_drafts]))[0]) + self.context_time(context)
        if usual > 0:
            change = seconds / usual / self._slowness
            self._slowness *= min(max(change, _SLOWER[0]), _SLOWER[1]) ** _SLOWNESS_RATE
        size = num_tokens.bit_length(), has_drafts
        steps = self._steps.get(size)
        if steps is None:
            steps = self._steps[size] = deque(maxlen=_STEPS_PER_SIZE)
            self._num_fitted = -_REFIT_STEPS  # of a new size the first one says much
        steps.append((num_tokens, has_drafts, context, seconds / self._slowness, self._num_seen))
        if self._num_seen - self._num_fitted >= _REFIT_STEPS:
            self._num_fitted = self._num_seen
            self._fit()

    def predict(self, num_tokens: IntArray, has_drafts: NDArray[np.bool_]) -> FloatArray:
        """Time of steps, but for what their context adds; zeros before the first."""
        return _features(num_tokens, has_drafts) @ self._coefficients[1:]

    def context_time(self, context: int) -> float:
        """Time that this context adds to a step."""
        return float(self._coefficients[0]) * context

    def _fit(self) -> None:
        for size, steps in list(self._steps.items()):
            while steps and self._num_seen - steps[0][-1] > _MAX_AGE_STEPS:
                steps.popleft()
            if not steps:
                del self._steps[size]
        rows = np.array([step for steps in self._steps.values() for step in steps])
        features = np.column_stack((rows[:, 2], _features(rows[:, 0], rows[:, 1])))
        features /= rows[:, 3:4]
        scale = np.abs(features).max(axis=0)
        used = np.flatnonzero(scale > 0)
        while len(used):
            solution = np.linalg.lstsq(features[:, used] / scale[used], np.ones(len(rows)))[0]
            if solution.min() >= 0:
                break
            used = np.delete(used, solution.argmin())
        self._coefficients[:] = 0
        if len(used):
            self._coefficients[used] = solution / scale[used]


def _features(num_tokens: NDArray[Any], has_drafts: NDArray[Any]) -> FloatArray:
    bends = np.maximum(num_tokens[:, None] - _KNEES, 0)
    return np.column_stack((np.ones(len(num_tokens)), num_tokens, has_drafts, bends))


class DraftBudget:
    """Chooses which of the proposed drafts a step computes.

    Args:
        num_rows: of the running set. max_step_drafts: of all rows in a step.
    """

    def __init__(self, num_rows: int, max_step_drafts: int) -> None:
        self.times = StepTimes()
        self._max_step_drafts = max_step_drafts
        # Of each class of evidence and of each row: drafts that were right, and all that were
        # looked at; of rows, as many as the classes let expect.
        self._right, self._seen = np.zeros(NUM_EVIDENCE), np.zeros(NUM_EVIDENCE)
        self._row_right, self._row_expected = np.zeros(num_rows), np.zeros(num_rows)

    def begin(self, row: int) -> None:
        """A row has another request: nothing is known of it."""
        self._row_right[row] = self._row_expected[row] = 0

    def choose(
        self, rows: IntArray, proposals: Proposals, budget: int, num_tokens: int, context: int
    ) -> IntArray:
        """Return how many of its drafts each row computes.

        budget: of drafts. num_tokens: of the step without drafts. context: that these attend to.
        """
        self._right *= _MEMORY
        self._seen *= _MEMORY
        self._row_right[rows] *= _MEMORY
        self._row_expected[rows] *= _MEMORY
        chances = self.chances(rows, proposals)
        is_draft = np.arange(chances.shape[1]) < proposals.counts[:, None]
        found = chances[is_draft]
        # Row after row, and a row's chances never rise: with a stable order the likeliest drafts
        # of all are the first ones of each row.
        order = np.argsort(-found, kind="stable")[: min(budget, self._max_step_drafts)]
        tokens = num_tokens + np.arange(len(order) + 1)
        times = self.times.predict(tokens, tokens > num_tokens) + self.times.context_time(context)
        if not times[0]:
            most = len(order)  # nothing is known yet: try them
        else:
            expected = len(rows) + np.concatenate(([0.0], found[order].cumsum()))
            speed = expected / times
            most = int(speed.argmax())
            if speed[most] < _MIN_GAIN * speed[0]:
                most = 0
        counts: IntArray = np.bincount(is_draft.nonzero()[0][order[:most]], minlength=len(rows))
        return counts

    def chances(self, rows: IntArray, proposals: Proposals) -> FloatArray:
        """Chance of each draft, [n, k]: that it and those before it are right."""
        rates = self._rates()
        trust = (self._row_right[rows] + _ROW_WEIGHT) / (self._row_expected[rows] + _ROW_WEIGHT)
        chances: FloatArray = np.minimum(rates[proposals.evidence] * trust[:, None], 1.0)
        return np.multiply.accumulate(chances, axis=1, out=chances)

    def _rates(self) -> FloatArray:
        """How often a draft of each class is right, if those before it are.

        Classes of which little is known are taken to be like the others.
        """
        num_right, num_seen = self._right.sum(), self._seen.sum()
        usual = (num_right + _PRIOR_RATE * _PRIOR_WEIGHT) / (num_seen + _PRIOR_WEIGHT)
        rates: FloatArray = (self._right + usual * _PRIOR_WEIGHT) / (self._seen + _PRIOR_WEIGHT)
        return rates

    def learn(
        self, rows: IntArray, evidence: NDArray[np.uint8], counts: IntArray, right: IntArray
    ) -> None:
        """Learn that of counts[i] drafts of a row the first right[i] were right.

        evidence: [n, k], see `Proposals`. What follows a wrong draft says nothing.
        """
        place = np.arange(evidence.shape[1])
        is_right = place < right[:, None]
        is_seen = place < np.minimum(right + 1, counts)[:, None]
        rates = self._rates()
        expected = np.where(is_seen, rates[evidence], 0.0).sum(axis=1)
        self._right += np.bincount(evidence[is_right], minlength=NUM_EVIDENCE)
        self._seen += np.bincount(evidence[is_seen], minlength=NUM_EVIDENCE)
        self._row_right[rows] = self._row_right[rows] * _ROW_MEMORY + right
        self._row_expected[rows] = self._row_expected[rows] * _ROW_MEMORY + expected
