"""How many drafts a step computes: as many as raise the tokens per second.

A draft counts only if it and those before it are right, so each has a chance: the product of how
often drafts with such evidence were right, which is learned, down its row. The likeliest drafts are
taken, as long as (tokens expected) / (seconds expected) rises; the seconds of a step of n tokens
are learned, too. So drafts that are rarely right, or a machine that has no time to spare because
many rows decode, end in plain decoding (SmartSpec, Liu et al. 2024, weighs the same two).
"""

from __future__ import annotations

from collections import deque
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from nanocore.engine_core.drafting.proposer import NUM_EVIDENCE, IntArray, Proposals
from nanocore.engine_core.policy.step_budget import fit_seconds

FloatArray = NDArray[np.float64]

_KNEES: Final = np.array([8.0, 16.0, 32.0, 64.0])
_STEPS_PER_SIZE: Final = 16
_REFIT_STEPS: Final = 64
_MAX_AGE_STEPS: Final = 512

_PRIOR_RATES: Final = np.linspace(0.4, 0.95, 9).repeat(8)[:NUM_EVIDENCE]
"""By class: the longer a match, the likelier its drafts; what a grammar forces is likeliest."""
_PRIOR_WEIGHT: Final = 4.0
_NUM_TRIED: Final = 8
"""Drafts of a step while few with drafts are remembered."""
_TRIED_STEPS: Final = 4
"""Steps with drafts that say what these take: a single one may have been held up."""
_MIN_GAIN: Final = 1.05
"""Drafts that promise less are not worth it: both estimates have errors."""
_FORGET_CHOICES: Final = 64
_MEMORY: Final = 0.9
_ROW_MEMORY: Final = 0.9
_ROW_WEIGHT: Final = 2.0
_OVERALL_MEMORY: Final = 0.98


class DecodeTimes:
    """Seconds of decode steps by their tokens: a line that bends upwards, and what guessing takes.

    No coefficient is below 0: more tokens never take less. The latest steps of each size (powers
    of two) and number of passes are remembered apart, and fitted to the relative error, in which a
    step that was held up weighs little. Steps are soon forgotten, because others may use
    the machine, too: what seemed to be slow then is tried again.
    """

    def __init__(self, max_tokens: int) -> None:
        self._steps: dict[tuple[int, int], deque[tuple[float, ...]]] = {}
        self._context = self._pass = 0.0
        # Seconds by tokens of a step without drafts; beyond, as the last one.
        self._plain = np.zeros(max_tokens + 1)
        self._num_seen = self._num_fitted = 0
        self.knows_drafts = False
        """Whether some steps with drafts are remembered."""

    def observe(self, num_tokens: int, num_passes: int, context: int, seconds: float) -> None:
        """Remember a step. num_passes: see `DraftBudget`. context: tokens of its rows."""
        if seconds <= 0 or num_tokens >= len(self._plain):
            return
        self._num_seen += 1
        size = num_tokens.bit_length(), num_passes
        steps = self._steps.setdefault(size, deque(maxlen=_STEPS_PER_SIZE))
        # Of a new size the first one says much, and while drafts are tried each one does.
        is_news = not steps or not (self.knows_drafts or num_passes == 0)
        steps.append((num_tokens, num_passes, context, seconds, self._num_seen))
        if is_news or self._num_seen - self._num_fitted >= _REFIT_STEPS:
            self._num_fitted = self._num_seen
            self._fit()

    def predict(self, num_tokens: int, passes: NDArray[Any], context: int) -> FloatArray:
        """Seconds of steps with 0, 1, 2... drafts beside num_tokens; zeros: nothing is known.

        passes: of each. A step of more tokens than are tabled is bound by products: each one costs
        the same.
        """
        start = min(num_tokens, len(self._plain) - len(passes))
        slope = self._plain[-1] - self._plain[-2]
        beside = self._context * context + slope * (num_tokens - start)
        times: FloatArray = self._plain[start : start + len(passes)] + beside + self._pass * passes
        return times

    def _fit(self) -> None:
        for size, steps in list(self._steps.items()):
            while steps and self._num_seen - steps[0][-1] > _MAX_AGE_STEPS:
                steps.popleft()
            if not steps:
                del self._steps[size]
        drafted = (len(steps) for (_, num_passes), steps in self._steps.items() if num_passes)
        self.knows_drafts = sum(drafted) >= _TRIED_STEPS
        rows = np.array([step for steps in self._steps.values() for step in steps])
        features = np.column_stack((rows[:, 2], rows[:, 1], _features(rows[:, 0])))
        coefficients = fit_seconds(features, rows[:, 3])
        self._context, self._pass = map(float, coefficients[:2])
        self._plain = _features(np.arange(len(self._plain))) @ coefficients[2:]


def _features(num_tokens: NDArray[Any]) -> FloatArray:
    bends = np.maximum(num_tokens[:, None] - _KNEES, 0)
    return np.column_stack((np.ones(len(num_tokens)), num_tokens, bends))


class DraftBudget:
    """Chooses which of the proposed drafts a step computes.

    Args:
        num_rows: of the running set. max_step_drafts: of all rows in a step. is_adaptive: False: a
            step computes all drafts up to its limits, whether they pay or not.
        has_passes: drafts are guessed one after the other, those of all rows in one pass. What
        else proposes drafts does so in one, however many.
    """

    def __init__(
        self,
        num_rows: int,
        max_step_drafts: int,
        is_adaptive: bool = True,
        has_passes: bool = False,
    ) -> None:
        self._is_adaptive = is_adaptive
        self._has_passes = has_passes
        self.times = DecodeTimes(num_rows + max_step_drafts)
        self._max_step_drafts = max_step_drafts
        # Of each class of evidence and of each row: drafts that were right, and all that were
        # looked at; of rows, as many as the classes let expect.
        self._right, self._seen = np.zeros(NUM_EVIDENCE), np.zeros(NUM_EVIDENCE)
        self._row_right, self._row_expected = np.zeros(num_rows), np.zeros(num_rows)
        # Likewise of all rows lately: what is likeliest is chosen, so it seems likelier than it is.
        self._lately_right = self._lately_expected = 0.0
        self._rates = _PRIOR_RATES
        self._num_choices = 0

    def begin(self, row: int) -> None:
        """A row has another request: nothing is known of it."""
        self._row_right[row] = self._row_expected[row] = 0

    def choose(
        self, rows: IntArray, proposals: Proposals, budget: int, num_tokens: int, context: int
    ) -> IntArray:
        """Return how many of its drafts each row computes.

        budget: of drafts. num_tokens: of the step without drafts. context: tokens of its rows.
        """
        self._num_choices += 1
        if self._num_choices % _FORGET_CHOICES == 0:
            self._forget()
        chances = self.chances(rows, proposals)
        is_draft = np.arange(chances.shape[1]) < proposals.counts[:, None]
        found = chances[is_draft]
        # Row after row, and a row's chances never rise: with a stable order the likeliest drafts
        # of all are the first ones of each row.
        order = np.argsort(-found, kind="stable")[: min(budget, self._max_step_drafts)]
        places = 1 + is_draft.nonzero()[1][order]
        passes = np.maximum.accumulate(places) if self._has_passes else np.ones_like(places)
        times = self.times.predict(num_tokens, np.append(0, passes), context)
        most = len(order)
        if self._is_adaptive and not self.times.knows_drafts:
            most = min(most, _NUM_TRIED)
        elif self._is_adaptive and times[0] <= 0:
            most = 0  # all known steps had drafts: one without is to be compared with them
        elif self._is_adaptive:
            speed = len(rows) + np.concatenate(([0.0], found[order].cumsum()))
            speed /= times
            most = int(speed.argmax())
            if speed[most] < _MIN_GAIN * speed[0]:
                most = 0
        counts: IntArray = np.zeros(len(rows), np.int64)
        if most:
            owners = np.arange(len(rows)).repeat(proposals.counts)
            counts += np.bincount(owners[order[:most]], minlength=len(rows))
        return counts

    def observe(self, num_rows: int, counts: IntArray | None, context: int, seconds: float) -> None:
        """Learn how long a decode step took. counts: its rows' drafts; None: there were none."""
        num_drafts = 0 if counts is None else int(counts.sum())
        num_passes = int(num_drafts > 0)
        if num_drafts and counts is not None and self._has_passes:
            num_passes = int(counts.max())
        self.times.observe(num_rows + num_drafts, num_passes, context, seconds)

    def chances(self, rows: IntArray, proposals: Proposals) -> FloatArray:
        """Chance of each draft, [n, k]: that it and those before it are right."""
        usual = (self._lately_right + _ROW_WEIGHT) / (self._lately_expected + _ROW_WEIGHT)
        right = self._row_right[rows] + min(usual, 1.0) * _ROW_WEIGHT
        trust = right / (self._row_expected[rows] + _ROW_WEIGHT)
        chances: FloatArray = self._rates[proposals.evidence] * trust[:, None]
        np.minimum(chances, 1.0, out=chances)
        return np.multiply.accumulate(chances, axis=1, out=chances)

    def learn(
        self, rows: IntArray, evidence: NDArray[np.uint8], counts: IntArray, right: IntArray
    ) -> None:
        """Learn that of counts[i] drafts of a row the first right[i] were right.

        evidence: [n, k], see `Proposals`. What follows a wrong draft says nothing.
        """
        place = np.arange(evidence.shape[1])
        is_right = place < right[:, None]
        is_seen = place < np.minimum(right + 1, counts)[:, None]
        expected = np.where(is_seen, self._rates[evidence], 0.0).sum(axis=1)
        self._row_right[rows] = self._row_right[rows] * _ROW_MEMORY + right
        self._row_expected[rows] = self._row_expected[rows] * _ROW_MEMORY + expected
        self._lately_right = self._lately_right * _OVERALL_MEMORY + int(right.sum())
        self._lately_expected = self._lately_expected * _OVERALL_MEMORY + float(expected.sum())
        self._right += np.bincount(evidence[is_right], minlength=NUM_EVIDENCE)
        self._seen += np.bincount(evidence[is_seen], minlength=NUM_EVIDENCE)
        self._update_rates()

    def _forget(self) -> None:
        """Weigh what was seen less, so that what is not tried any more is tried again."""
        for tally in (self._right, self._seen, self._row_right, self._row_expected):
            tally *= _MEMORY
        self._lately_right *= _MEMORY
        self._lately_expected *= _MEMORY
        self._update_rates()

    def _update_rates(self) -> None:
        """Learn how often a draft of each class is right, if those before it are."""
        right = self._right + _PRIOR_RATES * _PRIOR_WEIGHT
        self._rates = right / (self._seen + _PRIOR_WEIGHT)
