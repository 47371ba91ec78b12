"""What the step loop notes of steps and requests, for whoever makes metrics of it.

Noting costs the step loop an append and no lock: one thread appends, another one takes from the
left (`engine_core/metrics/`). Times are seconds of the scheduler's clock.
"""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from nanocore.engine_core.scheduling.life import Life
from nanocore.engine_core.scheduling.request import Request
from nanocore.protocol.messages import Event, FinishReason

logger = logging.getLogger(__name__)


class StepNote(msgspec.Struct, frozen=True, gc=False):
    """A step, when its result is in; a struct because it is made in a tenth of a microsecond.

    duration_s: since it was planned, or the step before it ended. num_free_blocks: and those before
    it, after the step.
    """

    number: int
    ended_s: float
    duration_s: float
    num_decode_tokens: int
    num_prefill_tokens: int
    num_running: int
    num_waiting: int
    num_free_blocks: int
    num_preempted: int

    @property
    def num_tokens(self) -> int:
        """Those that it computed."""
        return self.num_decode_tokens + self.num_prefill_tokens


class FirstToken(NamedTuple):
    """Of a request that has begun to answer.

    seconds: since the engine received it; None if its answer is an embedding, which has no tokens.
    """

    seconds: float | None
    num_cached_tokens: int


class Ended(NamedTuple):
    """A request that has ended, or one of several samples of it.

    num_samples: of the request, which `first_handle` names. max_tokens: output tokens that it might
    have had. request_id: of the request, in its client's session.
    """

    handle: int
    client: int
    request_id: str
    reason: FinishReason
    at_s: float
    received_s: float
    life: Life
    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int
    max_tokens: int
    first_handle: int
    num_samples: int


@dataclass(slots=True)
class Journal:
    """intervals: between two results of a row, and of how many rows; or of each of some rows."""

    steps: deque[StepNote] = field(default_factory=deque)
    intervals: deque[tuple[float, int] | NDArray[np.float64]] = field(default_factory=deque)
    first_tokens: deque[FirstToken] = field(default_factory=deque)
    ended: deque[Ended] = field(default_factory=deque)

    def begin(self, request: Request, now_s: float) -> None:
        """A request has its first token, or its embedding."""
        seconds = None
        if request.sampling.pooling is None:
            request.life.first_token_s = now_s
            seconds = now_s - request.received_s
        self.first_tokens.append(FirstToken(seconds, request.num_cached_tokens or 0))

    def end(self, request: Request, end: Event, now_s: float) -> None:
        """A request has ended; it has no row any more. What failed is in the log, too."""
        assert end.finish_reason is not None
        if end.finish_reason == "error":
            about = {"request_id": request.request_id}
            logger.error("request %r ends: %s", request.request_id, end.message, extra=about)
        request.life.move("ended", now_s)
        num_submitted = request.num_submitted_tokens
        entry = Ended(
            request.handle,
            request.client,
            request.client_request_id,
            end.finish_reason,
            now_s,
            request.received_s,
            request.life,
            request.num_prompt_tokens,
            max(request.life.num_tokens - num_submitted, 0),
            request.num_cached_tokens or 0,
            request.max_num_tokens - request.num_prompt_tokens,
            request.handle - request.sample,
            request.sampling.n,
        )
        self.ended.append(entry)
