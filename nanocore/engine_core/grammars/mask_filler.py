"""Threads that fill the masks of a step's rows while the model computes.

Matchers drop the interpreter's lock as they fill. Each thread takes the next free row, so a slow
one delays no other. One thread uses a filler: it begins, and waits.
"""

from __future__ import annotations

import logging
import os
import traceback
from collections.abc import Iterator, Sequence
from itertools import accumulate
from queue import SimpleQueue
from typing import Final

import numpy as np

from nanocore.engine_core.grammars.token_matcher import TokenMatcher
from nanocore.engine_core.requests.request import Request
from nanocore.engine_core.scheduling.scheduler import Scheduler
from nanocore.protocol.codec import pack_int32
from nanocore.system.large_stack_threads import start_thread
from nanocore.worker.executors.executor import StepExecutor
from nanocore.worker.plan import SchedulerOutput, TokenMasks

logger = logging.getLogger(__name__)

_CORES_PER_THREAD: Final = 8
"""The others are the model's, which computes meanwhile."""
_MAX_NUM_THREADS: Final = 8


class MaskFiller:
    """Fills up to max_num_masks token masks at a time.

    Args:
        vocab_size: of the model, in tokens. num_threads: by default a few, by the cores there are.

    Raises:
        RuntimeError: the system gives no thread.
    """

    def __init__(self, vocab_size: int, max_num_masks: int, num_threads: int | None = None) -> None:
        # Pages are touched only as rows are filled.
        self._words_MW = np.zeros((max_num_masks, -(-vocab_size // 32)), np.int32)
        self._matchers: Sequence[TokenMatcher] = ()
        self._drafts: Sequence[Sequence[int]] = ()
        self._starts: list[int] = []
        self._has_mask: list[bool] = []
        self._bugs: dict[int, str] = {}
        self._left: Iterator[int] = iter(())
        self._num_busy = 0
        self._begun: SimpleQueue[bool] = SimpleQueue()
        self._done: SimpleQueue[None] = SimpleQueue()
        num_cores = len(os.sched_getaffinity(0))
        num_threads = num_threads or min(max(num_cores // _CORES_PER_THREAD, 1), _MAX_NUM_THREADS)
        self._threads = [start_thread(self._run, f"masks-{i}") for i in range(num_threads)]

    def begin(
        self, matchers: Sequence[TokenMatcher], drafts: Sequence[Sequence[int]] | None = None
    ) -> None:
        """Start filling masks for each matcher: one, and one behind each of its drafts, if any.

        Until `wait` nobody else may touch the matchers.
        """
        assert not self._num_busy, "masks are being filled"
        self._matchers = matchers
        self._drafts = drafts or [()] * len(matchers)
        self._starts = [0, *accumulate(1 + len(own) for own in self._drafts)]
        self._has_mask = [False] * len(matchers)
        self._bugs = {}
        self._left = iter(range(len(matchers)))  # whoever calls next() has the row for itself
        self._num_busy = min(len(self._threads), len(matchers))
        for _ in range(self._num_busy):
            self._begun.put(True)

    def wait(self) -> tuple[list[int], dict[int, str]]:
        """Return the matchers that have masks, and failures; the others allow all tokens."""
        for _ in range(self._num_busy):
            self._done.get()
        self._num_busy = 0
        failures = {i: one.failure for i, one in enumerate(self._matchers) if one.failure}
        failures |= self._bugs
        has_mask = [i for i, has in enumerate(self._has_mask) if has and i not in failures]
        return has_mask, failures

    def words(self, masks: Sequence[int]) -> bytes:
        """Concatenate the masks of these matchers, as `TokenMasks` has them."""
        starts = self._starts
        return b"".join(
            [self._words_MW[one] for i in masks for one in range(starts[i], starts[i + 1])]
        )

    def num_masks(self, i: int) -> int:
        """Return how many masks a matcher has: one more than drafts."""
        return 1 + len(self._drafts[i])

    def close(self) -> None:
        """End the threads, each when it has filled its mask. Idempotent."""
        for _ in self._threads:
            self._begun.put(False)

    def _run(self) -> None:
        while self._begun.get():
            for i in self._left:
                self._fill(i)
            self._done.put(None)

    def _fill(self, i: int) -> None:
        """Fill a row's masks. Any error is its alone; native code panics with a BaseException."""
        matcher, drafts = self._matchers[i], self._drafts[i]
        words_DW = self._words_MW[self._starts[i] : self._starts[i + 1]]
        try:
            if matcher.failure is None:
                self._has_mask[i] = matcher.fill(words_DW[0])
                if len(drafts) and matcher.failure is None:
                    if not self._has_mask[i]:
                        words_DW[0] = -1
                    self._has_mask[i] |= matcher.fill_behind(words_DW[1:], drafts)
        except BaseException as error:
            # Without the error's text: it may quote what the client sent.
            where = "".join(traceback.format_tb(error.__traceback__))
            logger.error("a mask could not be filled: %s\n%s", type(error).__name__, where)
            self._bugs[i] = f"internal error: {type(error).__name__} in its structured output"


class StepMasks:
    """Fills the masks of the step that waits for them, once its tokens are known.

    At most one step waits for masks, the last one submitted, and none is submitted meanwhile. If no
    step in flight samples what the masks depend on, they are filled while it computes; otherwise
    when its result is in. Rows that have ended meanwhile get none.

    filler: None if no request is structured.
    """

    def __init__(
        self, scheduler: Scheduler, executor: StepExecutor, filler: MaskFiller | None
    ) -> None:
        self._scheduler = scheduler
        self._executor = executor
        self._filler = filler
        self._plan: SchedulerOutput | None = None
        self._filling: list[tuple[int, Request]] | None = None
        self._waiting_for: list[tuple[int, Request]] = []

    @property
    def is_awaited(self) -> bool:
        """Whether a step must sample before another one is submitted."""
        return self._plan is not None

    def begin(self, plan: SchedulerOutput) -> None:
        """Start filling the masks of a step, if its tokens are known, before it is submitted."""
        if plan.awaits_masks:
            self._plan = plan
            self._fill()

    def sample(self) -> list[tuple[Request, str]]:
        """Let the step that waits for masks sample, if they are known.

        To be called after it was submitted and whenever a result was taken in. Returns the requests
        that cannot go on, and why; they have no mask.
        """
        if self._plan is None:
            return []
        if self._filling is None:
            self._fill()
            if self._filling is None:
                return []
        assert self._filler is not None
        filled, plan = self._filling, self._plan
        self._waiting_for = filled
        masks, failures = self._filler.wait()
        self._waiting_for = []
        self._filling = self._plan = None
        rows = pack_int32([filled[i][0] for i in masks for _ in range(self._filler.num_masks(i))])
        words = self._filler.words(masks)
        self._executor.sample(TokenMasks(step=plan.step, rows=rows, words=words))
        return [(filled[i][1], failures[i]) for i in sorted(failures)]

    def blame(self) -> str | None:
        """Clause that names the requests whose masks it waits for, or None; for any thread."""
        if not (waiting_for := self._waiting_for):
            return None
        ids = ", ".join(repr(request.request_id) for _, request in waiting_for[:3])
        more = f" and {len(waiting_for) - 3} more" if len(waiting_for) > 3 else ""
        return f"it waits for the masks of the structured outputs of requests {ids}{more}"

    def _fill(self) -> None:
        *before, planned = [one.plan for one in self._scheduler.running.in_flight]
        sampling = {request for earlier in before for _, request in earlier.masked}
        if not sampling.isdisjoint(request for _, request in planned.masked):
            return  # a mask follows from all tokens so far, and one of them is in flight
        self._filling = [(row, request) for row, request in planned.masked if request.row == row]
        matchers = [request.matcher for _, request in self._filling if request.matcher is not None]
        assert self._filler is not None, "a structured request in an engine that has none"
        drafts = [planned.masked_drafts.get(row, ()) for row, _ in self._filling]
        self._filler.begin(matchers, drafts)
