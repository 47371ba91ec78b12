"""The step that awaits masks: they are begun once its tokens are known, and handed over.

At most one step awaits masks, the one that was submitted last, and none is submitted while it does.
If no step in flight samples what its masks follow from, they are filled while it computes; else
when that one's result is in. Rows that have ended meanwhile have none.
"""

from __future__ import annotations

from nanocore.engine_core.requests.request import Request
from nanocore.engine_core.scheduling.scheduler import Scheduler
from nanocore.engine_core.structured.mask_filler import MaskFiller
from nanocore.protocol.codec import pack_int32
from nanocore.worker.executors.executor import StepExecutor
from nanocore.worker.plan import SchedulerOutput, TokenMasks


class StepMasks:
    """Belongs to the step loop.

    Args:
        scheduler: whose steps they are. executor: which gets the masks. filler: None if no request
        is structured.
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
        """Whether a step has to sample before another one is submitted."""
        return self._plan is not None

    def begin(self, plan: SchedulerOutput) -> None:
        """A step was planned that is to be submitted next: fill its masks, if they are known."""
        if plan.awaits_masks:
            self._plan = plan
            self._fill()

    def sample(self) -> list[tuple[Request, str]]:
        """Let the step that awaits masks sample, if they are known.

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
        rows = pack_int32([filled[i][0] for i in masks])
        words = self._filler.words(masks)
        self._executor.sample(TokenMasks(step=plan.step, rows=rows, words=words))
        return [(filled[i][1], failures[i]) for i in sorted(failures)]

    def blame(self) -> str | None:
        """Whose masks the step loop waits for, as a clause, if for any; from any thread."""
        waiting_for = self._waiting_for
        if not waiting_for:
            return None
        ids = ", ".join(repr(request.request_id) for _, request in waiting_for[:3])
        more = f" and {len(waiting_for) - 3} more" if len(waiting_for) > 3 else ""
        return f"it waits for the masks of the structured outputs of requests {ids}{more}"

    def _fill(self) -> None:
        if not self._scheduler.running.are_masks_known:
            return
        masked = self._scheduler.planned.masked
        self._filling = [(row, request) for row, request in masked if request.row == row]
        matchers = [request.matcher for _, request in self._filling if request.matcher is not None]
        assert self._filler is not None, "a structured request in an engine that has none"
        self._filler.begin(matchers)
