"""The step's token budget under a latency target: prompts wait so that decodes do not.

Tokens decoded in one step with long prompt chunks come as late as the chunks are long. From the
steps seen, a cost model predicts how long a step takes, and a step with decodes gets only as many
prompt tokens as keep it under the target (the idea of Sarathi-Serve's chunk size, Agrawal et al.
2024, found at run time instead of by profiling).
"""

from __future__ import annotations

import math
from collections import deque

import numpy as np
from numpy.typing import NDArray

MIN_PROMPT_TOKENS = 16
"""Prompts get so many tokens even if decodes alone miss the target: nobody starves."""

_STEPS_PER_SIZE = 8
_MIN_MARGIN = 0.05
_GROWTH = 2


class CostModel:
    """Seconds of a step as a + b * tokens + c * context, with no coefficient below 0.

    context: over all tokens of the step, the tokens each attends to. Fitted by least squares to the
    relative error. The steps of each size (powers of two) are remembered apart, the latest few, so
    that long stretches of equal steps do not make the model forget the others.
    """

    def __init__(self) -> None:
        self._steps: dict[int, deque[tuple[float, float, float]]] = {}
        self._coefficients: NDArray[np.float64] | None = None
        self.max_tokens = 0
        """Tokens of the largest step remembered."""

    def observe(self, num_tokens: int, context: int, seconds: float) -> None:
        """Remember a step."""
        steps = self._steps.setdefault(num_tokens.bit_length(), deque(maxlen=_STEPS_PER_SIZE))
        steps.append((num_tokens, context, seconds))
        self.max_tokens = max(self.max_tokens, num_tokens)
        self._coefficients = None

    def coefficients(self) -> tuple[float, float, float]:
        """(a, b, c) of the steps seen; zeros before the first."""
        if self._coefficients is None:
            self._coefficients = self._fit()
        a, b, c = self._coefficients.tolist()
        return a, b, c

    def predict(self, num_tokens: int, context: int) -> float:
        """Seconds that a step would take."""
        a, b, c = self.coefficients()
        return a + b * num_tokens + c * context

    def _fit(self) -> NDArray[np.float64]:
        steps = np.array([step for steps in self._steps.values() for step in steps])
        if not len(steps):
            return np.zeros(3)
        return fit_seconds(
            np.column_stack((np.ones(len(steps)), steps[:, 0], steps[:, 1])), steps[:, 2]
        )


def fit_seconds(features: NDArray[np.float64], seconds: NDArray[np.float64]) -> NDArray[np.float64]:
    """Fit seconds [n] to features [n, k] by least squares to the relative error.

    Returns k coefficients, none below 0: features that would have one count as 0, one by one.
    """
    coefficients = np.zeros(features.shape[1])
    relative = features / seconds[:, None]
    scale = np.abs(relative).max(axis=0)
    used = np.flatnonzero(scale > 0)
    while len(used):
        solution = np.linalg.lstsq(relative[:, used] / scale[used], np.ones(len(seconds)))[0]
        if solution.min() >= 0:
            coefficients[used] = solution / scale[used]
            break
        used = np.delete(used, solution.argmin())
    return coefficients


class StepBudget:
    """Decides a step's token budget.

    Args:
        max_num_batched_tokens: the budget at most.
        target_s: seconds that a step with decodes should stay under; infinity is no target.
    """

    def __init__(self, max_num_batched_tokens: int, target_s: float) -> None:
        self.max_num_batched_tokens = max_num_batched_tokens
        self.target_s = target_s
        self.cost_model = CostModel()
        self._error = 0.0

    @property
    def has_target(self) -> bool:
        """Whether steps are measured at all."""
        return math.isfinite(self.target_s)

    def observe(self, num_tokens: int, context: int, seconds: float) -> None:
        """Learn from a step. context: see `CostModel`."""
        if num_tokens == 0 or seconds <= 0:
            return
        if self.cost_model.max_tokens:
            surprise = seconds / max(self.cost_model.predict(num_tokens, context), 1e-9) - 1
            self._error = max(min(surprise, 1.0), 0.97 * self._error)
        self.cost_model.observe(num_tokens, context, seconds)

    def num_tokens(self, num_decodes: int, decode_context: int, prompt_computed: int) -> int:
        """Budget of a step in which so many rows decode while prompts wait for the rest.

        decode_context: tokens the decodes attend to, in sum. prompt_computed: tokens computed of
        the prompt that takes the rest.
        """
        if not self.has_target or num_decodes == 0:
            return self.max_num_batched_tokens
        a, b, c = self.cost_model.coefficients()
        # The worst recent surprise is the margin; what the model never saw, it may grow into.
        limit_s = self.target_s / (1 + max(self._error, _MIN_MARGIN))
        slack_s = max(limit_s - (a + b * num_decodes + c * decode_context), 0.0)
        most = max(_GROWTH * self.cost_model.max_tokens, MIN_PROMPT_TOKENS)
        # n prompt tokens attend to n * prompt_computed + n * (n + 1) / 2 tokens.
        linear = b + c * (prompt_computed + 0.5)
        # The root of linear * n + c * n * n / 2 = slack_s, in the form that survives a tiny c.
        divisor = linear + math.sqrt(linear * linear + 2 * c * slack_s)
        num_prompt = 2 * slack_s / divisor if divisor > 0 else most
        num_prompt = max(min(num_prompt, most), MIN_PROMPT_TOKENS)
        return min(num_decodes + int(num_prompt), self.max_num_batched_tokens)
