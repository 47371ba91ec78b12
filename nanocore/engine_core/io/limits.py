"""Limits of clients and of the waiting queue, and the drain rate from which Retry-After follows.

An unbounded queue turns overload into timeouts for everybody. The io thread asks before it accepts
a request; the step loop's counters say how much has left the queue. Each side writes only its own
numbers, so no lock is needed.
"""

from __future__ import annotations

import math
import os
import resource
import time
from collections.abc import Callable
from operator import add, sub
from typing import Final, TypeAlias

import msgspec

from nanocore.engine_core.log.event_log import SchedulerCounters
from nanocore.protocol.errors import ConfigError, EngineOverloadedError
from nanocore.protocol.messages import Submit
from nanocore.protocol.sampling import EngineSamplingParams

DEFAULT_MAX_NUM_CLIENTS: Final = 1024
MAX_UNADMITTED: Final = 256
MIN_UNADMITTED: Final = 8
_KEPT_BACK: Final = 24  # model files, graphs, ranks, logs: what is opened while serving


class ClientLimit(msgspec.Struct, frozen=True):
    """Limit of clients: as many as asked for, and as file descriptors allow.

    Every connection is a descriptor, and the process needs some for itself. Connections without a
    session cost nothing to open, so they get a bounded share of the rest.

    max_num_clients: sessions at once. max_connections: with and without a session.
    """

    max_num_clients: int
    max_connections: int

    @classmethod
    def of_this_process(cls, asked: int | None) -> ClientLimit:
        """Fit the limit to the free descriptors. asked: sessions; None is the default, or fewer.

        Raises:
            ConfigError: they do not allow as many as asked for, or not a single one.
        """
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        num_free = 2**31 if limit == resource.RLIM_INFINITY else limit
        num_free -= len(os.listdir("/proc/self/fd")) + _KEPT_BACK
        most = num_free - MIN_UNADMITTED
        wanted = DEFAULT_MAX_NUM_CLIENTS if asked is None else asked
        if most < (asked or 1):
            raise ConfigError(
                f"--max-num-clients {wanted}: this process may have {limit} descriptors, which is "
                f"enough for {max(0, most)} clients; raise the limit (ulimit -Hn) or lower the flag"
            )
        max_num_clients = min(wanted, most)
        return cls(max_num_clients, min(num_free, max_num_clients + MAX_UNADMITTED))


def raise_descriptor_limit() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


HORIZON_S: Final = 10.0
MIN_RETRY_S: Final = 0.05
MAX_RETRY_S: Final = 60.0
UNKNOWN_RETRY_S: Final = 1.0
MAX_UNKNOWN_RETRY_S: Final = 5.0


class DrainRate:
    """Drain rate of a queue: an exponential mean over `HORIZON_S` of times with something left.

    The total is read whenever a request or session asks to enter, so it needs no thread and no
    timer. An interval ends when something drained, not when that is seen: who was told to come back
    later would else measure how long it stayed away. Times are seconds of any one monotonic clock.
    """

    def __init__(self) -> None:
        self._drained = 0.0  # within the horizon
        self._seconds = 0.0  # likewise
        self._total: int | None = None  # at the interval's begin, if something was there
        self._begun_s = 0.0
        self._waited_s = 0.0  # since something drained

    def observe(
        self, now_s: float, total: int, is_empty: bool, drained_s: float | None = None
    ) -> None:
        """Note how many have drained since the start.

        is_empty: nothing is left to drain. drained_s: when the last drained; None: just now.
        """
        if self._total is None:
            self._total, self._begun_s = total, now_s
        elif total > self._total:
            drained_s = now_s if drained_s is None else drained_s
            elapsed_s = max(drained_s - self._begun_s, 0.0)
            kept = math.exp(-elapsed_s / HORIZON_S)
            self._seconds = self._seconds * kept + elapsed_s
            self._drained = self._drained * kept + total - self._total
            self._total, self._begun_s = total, drained_s
        if is_empty:
            self._total = None
        self._waited_s = now_s - self._begun_s

    def retry_after_s(self, needed: float) -> float:
        """Return when as many as needed will have drained, from 0.05 to 60 s.

        With no rate yet it is as long again as nothing has drained, from 1 to 5 s.
        """
        if not self._seconds:
            return round(min(max(self._waited_s, UNKNOWN_RETRY_S), MAX_UNKNOWN_RETRY_S), 3)
        each_s = self._seconds / self._drained
        # The next one is due; if it is late, it is taken to be late by as much again.
        wait_s = (needed - 1) * each_s + abs(each_s - self._waited_s)
        return round(min(max(wait_s, MIN_RETRY_S), MAX_RETRY_S), 3)


_SAMPLE_BYTES: Final = 2048  # a Request, what it points to, and its place in the queue
_KEY_BYTES: Final = 72  # of a full block
_NUMBER_BYTES: Final = 40  # an int, and its place in a list
_TOKEN_BYTES: Final = 4


def held_bytes(submit: Submit, sampling: EngineSamplingParams, block_size: int) -> int:
    """Estimate the memory that a request holds while it waits, all its samples together.

    Python's objects are larger than the frames that they come from. So what can be long is counted
    as it is held: columns, block keys, lists of numbers, and the texts of structured outputs.

    block_size: tokens to a block key.
    """
    columns = len(submit.prompt_token_ids) + len(submit.output_token_ids)
    keys = columns // (_TOKEN_BYTES * block_size) * _KEY_BYTES
    numbers = len(sampling.stop_token_ids) + 2 * len(sampling.logit_bias)
    numbers += len(sampling.allowed_token_ids or ())
    numbers += sum(1 + len(word) for word in sampling.bad_words_token_ids)
    held = columns + _NUMBER_BYTES * numbers
    if sampling.structured_outputs is not None:
        held += len(msgspec.msgpack.encode(sampling.structured_outputs))
    return held + sampling.n * (_SAMPLE_BYTES + keys)


_Quantities: TypeAlias = tuple[int, ...]
"""Requests, tokens, bytes."""


class QueueLimit:
    """Limits of the waiting queue.

    Args:
        max_num_queued_reqs, max_num_queued_tokens, max_num_queued_bytes: limits of requests that
        wait for their first step, of their tokens, and of the memory they hold. As many as rows are
        free do not count as waiting. One request may always wait, however large; so may one of each
        session, within the memory limit: what others have queued may delay a new session, not lock
        it out.
        counters: the scheduler's. clock: monotonic, in seconds.
    """

    def __init__(
        self,
        max_num_queued_reqs: int,
        max_num_queued_tokens: int,
        counters: SchedulerCounters,
        max_num_queued_bytes: int = 2**28,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._limits: _Quantities = max_num_queued_reqs, max_num_queued_tokens, max_num_queued_bytes
        limits = "max_num_queued_reqs", "max_num_queued_tokens", "max_num_queued_bytes"
        self.rejections = dict.fromkeys(limits, 0)
        """Requests that were refused, by the limit."""
        self._counters = counters
        self._clock = clock
        self._entered: _Quantities = (0, 0, 0)
        self._outflow = DrainRate()

    def enter(
        self,
        num_tokens: int,
        num_samples: int = 1,
        num_bytes: int = 0,
        is_only: bool = False,
    ) -> None:
        """Count a request in; each of its samples counts as one request.

        num_tokens: prompt and resumed outputs. is_only: its session has no other open request.

        Raises:
            EngineOverloadedError: the queue is full; nothing was counted.
        """
        gone = self._counters
        totals = gone.dequeued_reqs, gone.dequeued_tokens, gone.dequeued_bytes
        # Read after the totals: see `count_dequeued`.
        num_free_rows = 0 if gone.is_paused else gone.num_free_rows
        reqs, tokens, held = map(sub, self._entered, totals)
        now_s = self._clock()
        # What takes a free row leaves at once, which says nothing of how long others wait.
        is_empty = not reqs or num_free_rows > 0
        self._outflow.observe(now_s, totals[0], is_empty, gone.dequeued_s)
        waiting = max(reqs - num_free_rows, 0), tokens, held
        more = num_samples, num_tokens, num_bytes
        found = self._problem(waiting, more, may_exceed=is_only and num_samples == 1)
        if found is not None:
            limit, problem = found
            self.rejections[limit] += 1
            retry_s = self._retry_after_s(waiting, more)
            raise EngineOverloadedError(
                f"the engine is overloaded: {problem}; try again in {retry_s:.2g} s", retry_s
            )
        self._entered = tuple(map(add, self._entered, more))

    def _problem(
        self, waiting: _Quantities, more: _Quantities, may_exceed: bool
    ) -> tuple[str, str] | None:
        """Return (limit, reason) if the request may not wait. may_exceed: limits except bytes."""
        reqs, tokens, held = waiting
        num_samples, num_tokens, num_bytes = more
        max_reqs, max_tokens, max_bytes = self._limits
        if not reqs:
            return None
        if reqs + num_samples > max_reqs and not may_exceed:
            samples = "" if num_samples == 1 else f"; here come {num_samples} samples more"
            return "max_num_queued_reqs", (
                f"{reqs} requests wait, and at most {max_reqs} may (--max-num-queued-reqs){samples}"
            )
        if tokens + num_tokens > max_tokens and not may_exceed:
            return "max_num_queued_tokens", (
                f"requests of {tokens} prompt tokens wait; with {num_tokens} more they "
                f"would be over {max_tokens} (--max-num-queued-tokens)"
            )
        if held + num_bytes > max_bytes:
            return "max_num_queued_bytes", (
                f"requests that wait hold {held} bytes; with {num_bytes} more they would be "
                f"over {max_bytes} (--max-num-queued-bytes)"
            )
        return None

    def _retry_after_s(self, waiting: _Quantities, more: _Quantities) -> float:
        """Return when enough has drained for the request; at the latest when nobody waits."""
        # A limit that is exceeded by a share of what waits needs that share of the requests to go.
        shares = [
            (now + n - limit) / max(now, 1)
            for now, n, limit in zip(waiting, more, self._limits, strict=True)
        ]
        return self._outflow.retry_after_s(max(min(max(shares), 1.0) * waiting[0], 1.0))
