"""Repetition detection: whether the output ends with a pattern that was repeated often enough.

A pattern of p tokens stands n times in a row at the end exactly if the last p * (n - 1) tokens each
equal the token p places before them. So it is enough to know, for each period p, the last token
that differs from the one p places before it. One comparison of columns per token finds the periods
at which it differs, however often a pattern has to be repeated.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from nanocore.engine_core.requests.request import TOKEN_DTYPE
from nanocore.protocol.sampling import RepetitionDetectionParams

_NO_ID = -2
"""Stands for the tokens before the output: equal to no token, and not to NO_TOKEN."""
_TAIL = 64
"""Tokens that are looked at first: hardly a period goes on for longer."""


class RepetitionDetector:
    """Detector of one request. It is a function of the output tokens alone, so a request that gets
    another row, or goes on in another engine, gets another one, made from its outputs.

    outputs: int32 [num_tokens], the output so far.
    """

    __slots__ = ("_broken", "_earliest", "_needed", "_newest", "_num_tokens", "_recent", "_span")

    def __init__(self, params: RepetitionDetectionParams, outputs: NDArray[np.int32]) -> None:
        first, last = max(params.min_pattern_size, 1), params.max_pattern_size
        periods = np.arange(first, last + 1)
        self._span = first - 1, last
        # By period, as counts of output tokens: the last one that differs from the one a period
        # before it (or has none), and how many must follow it.
        self._broken = np.zeros(len(periods), np.int32)
        if len(outputs):  # of a request that had a row before, here or in another engine
            self._broken[:] = [_last_difference(outputs, period) for period in periods.tolist()]
        self._needed = (periods * (params.min_count - 1)).astype(np.int32)
        # The newest token first, so that those before it are in the order of periods. Written
        # backwards; at its beginning the last tokens move to the end.
        self._recent = np.full(2 * last, _NO_ID, TOKEN_DTYPE)
        self._newest = last
        tail = outputs[-last:]
        self._recent[last : last + len(tail)] = tail[::-1]
        self._num_tokens = len(outputs)
        self._earliest = self._find_earliest()

    @property
    def is_repeating(self) -> bool:
        """Whether the output ends with a pattern that is repeated often enough."""
        return self._num_tokens >= self._earliest

    def append(self, token_id: int) -> bool:
        """Take in the next output token; returns `is_repeating`."""
        self._num_tokens = number = self._num_tokens + 1
        recent, newest, (first, last) = self._recent, self._newest, self._span
        self._broken[recent[newest + first : newest + last] != token_id] = number
        if not newest:
            recent[last:] = recent[:last]
            newest = last
        self._newest = newest - 1
        recent[newest - 1] = token_id
        # Differences only put the earliest end off, so until it is reached nothing is to be done.
        if number >= self._earliest:
            self._earliest = self._find_earliest()
        return number >= self._earliest

    def _find_earliest(self) -> int:
        """Return the number of output tokens with which it repeats itself, if none differs."""
        return int((self._broken + self._needed).min())


def _last_difference(outputs: NDArray[np.int32], period: int) -> int:
    """Return the number, from 1, of the last token that differs from the one a period before it.

    The first `period` tokens have none before them, and count as different.
    """
    num_tokens = len(outputs)
    for start in (max(period, num_tokens - _TAIL), period):
        differs = outputs[start:] != outputs[start - period : max(num_tokens - period, 0)]
        if differs.any():
            return num_tokens - int(differs[::-1].argmax())
    return min(period, num_tokens)
