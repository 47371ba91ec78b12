"""Stop checks: with which token a request ends, and its final event.

In this order: min_tokens, EOS, stop ids, repetition, length. A request also ends when it gets no
token because its logits are not finite; then its blocks must not be found by others. An embedding
ends a request, too, in place of the token that was sampled with it.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from nanocore.engine_core.requests.repetition import RepetitionDetector
from nanocore.engine_core.requests.request import Request
from nanocore.protocol.messages import Event, FinishReason
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
