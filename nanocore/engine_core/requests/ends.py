"""Stop checks: with which token a request ends, and its final event.

In this order: min_tokens, EOS, stop ids, repetition, length. A request also ends when it gets no
token because its logits are not finite; then its blocks must not be found by others. An embedding
ends a request, too, in place of the token that was sampled with it.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from nanocore.engine_core.requests.request import TOKEN_DTYPE, Request
from nanocore.protocol.messages import Event, FinishReason
from nanocore.protocol.sampling import RepetitionDetectionParams
from nanocore.worker.plan import NO_TOKEN

End = tuple[Request, Event]

MASKS: Final = (
    "structured_outputs",
    "allowed_token_ids",
    "logit_bias",
    "min_tokens",
    "bad_words_token_ids",
)
"""Sampling parameters that may leave no token."""
_NOT_FINITE: Final = (
    "the embedding is not finite (NaN or infinity): the model's weights or the KV cache are "
    "damaged, or its dtype overflows; try --dtype float32"
)
_NO_ID: Final = -2
"""Stands for the tokens before the output: equal to no token, and not to NO_TOKEN."""
_TAIL: Final = 64
"""Tokens that are compared first: few periods go on for longer."""


class StopIds:
    """How many requests stop at a token id, for all ids: most tokens are none, and cost no Python.

    The last element stands for all larger ids.
    """

    def __init__(self) -> None:
        self.counts = np.zeros(1, np.int32)

    def add(self, request: Request) -> None:
        self._count(request, 1)

    def remove(self, request: Request) -> None:
        self._count(request, -1)

    def find(self, token_ids: NDArray[np.int32]) -> list[int]:
        """Return indices of tokens that are EOS or a stop id of some request, any one."""
        if len(self.counts) == 1:
            return []
        hits: list[int] = self.counts_of(token_ids).nonzero()[0].tolist()
        return hits

    def counts_of(self, token_ids: NDArray[np.int32]) -> NDArray[np.int32]:
        """Return how many requests stop at each of these tokens, in their shape."""
        # Ids beyond the table are clipped to its last element, which is 0 or counts larger ids.
        return self.counts.take(token_ids, mode="clip")

    def _count(self, request: Request, change: int) -> None:
        for token_id in request.stop_token_ids:
            if token_id + 2 > len(self.counts):
                more = np.zeros(token_id + 3 - len(self.counts), np.int32)
                self.counts = np.append(self.counts[:-1], more)
            self.counts[token_id] += change


class RepetitionDetector:
    """Tells whether a request's output ends with a pattern that is repeated often enough.

    A pattern of p tokens stands n times in a row at the end exactly if the last p * (n - 1) tokens
    each equal the token p places before them. So it is enough to know, for each period p, the last
    token that differs from the one p places before it. One comparison of columns per token finds
    the periods at which it differs, however often a pattern has to be repeated.

    It is a function of the output alone, so a request that gets another row, or continues in
    another engine, gets a new detector, made from its output.

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


def end_by_stop(request: Request, token_id: int, number: int) -> Event | None:
    """Return the end event if output token `number`, from 1, is EOS or a stop id."""
    # It is not sampled before min_tokens, because it is masked; resumed outputs may have it.
    if number <= request.sampling.min_tokens:
        return None
    is_eos = token_id in request.eos_token_ids
    if is_eos or token_id in request.sampling.stop_token_ids:
        stop_reason = None if is_eos else token_id
        return Event(handle=request.handle, finish_reason="stop", stop_reason=stop_reason)
    return None


def end_by_repetition(request: Request, number: int) -> Event | None:
    """Return the end of a request whose output repeats itself with token `number`, from 1."""
    # With this token the output has min_tokens, so the request may end.
    if number < request.sampling.min_tokens:
        return None
    return Event(handle=request.handle, finish_reason="stop", stop_cause="repetition")


def end_by_outputs(request: Request) -> Event | None:
    """Return the end of a request whose resumed outputs have completed it, or None."""
    if not (outputs := request.resumed_tokens):
        return None
    stop = end_by_stop(request, outputs[-1], len(outputs))
    if stop is None and (detection := request.sampling.repetition_detection) is not None:
        column = np.array(outputs, np.int32)
        if RepetitionDetector(detection, column).is_repeating:
            stop = end_by_repetition(request, len(outputs))
    if stop is None and request.num_tokens == request.max_num_tokens:
        return Event(handle=request.handle, finish_reason="length")
    return stop


def end_outside_a_step(request: Request, reason: FinishReason, message: str | None) -> Event:
    """Make the event of an abort or an error. A grammar that fails is the request's own fault."""
    is_invalid = reason == "error" and request.matcher is not None and request.matcher.failure
    return Event(
        handle=request.handle,
        finish_reason=reason,
        message=message,
        code="invalid_request" if is_invalid else None,
    )


def end_by_result(
    request: Request, number: int, token_id: int, embedding: bytes | None, is_repeating: bool
) -> Event | None:
    """Return the end that output token `number`, from 1, brings, if any.

    embedding: float32 bytes, of a request that ends with one. is_repeating: whether the output
    repeats itself with this token.
    """
    if token_id == NO_TOKEN:
        return _end_without_token(request, number)
    if embedding is None:
        stop = end_by_stop(request, token_id, number)
        return end_by_repetition(request, number) if stop is None and is_repeating else stop
    if np.isfinite(np.frombuffer(embedding, "<f4")).all():
        return Event(handle=request.handle, finish_reason="stop", embedding=embedding)
    return Event(handle=request.handle, finish_reason="error", message=_NOT_FINITE)


def _end_without_token(request: Request, number: int) -> Event:
    masks = [name for name in MASKS if getattr(request.sampling, name)]
    if masks:
        message = (
            f"no token is left to choose for output token {number}: {', '.join(masks)} of this "
            "request forbid all, so relax them; or the model's logits are not finite (NaN)"
        )
    else:
        message = (
            f"the logits of output token {number} are not finite (NaN or infinity): the model's "
            "weights or the KV cache are damaged, or its dtype overflows; try --dtype float32"
        )
    return Event(
        handle=request.handle,
        finish_reason="error",
        message=message,
        code="invalid_request" if masks else None,
    )
