"""The event log: what happened in each step and to each request, told once.

The step loop appends, and nothing else: no lock, no arithmetic. All that is shown of it is a fold
of the entries: metrics and the live view (`metrics.py`, `history.py`) and the machine's use
(`utilisation.py`) on the io thread, which takes entries from the left, often, so that the log stays
small; the step trace (`trace.py`) at once. Times are seconds of the scheduler's clock.

A new kind of entry is told by one append. Folds ignore what they do not know; a phase is in the
live view at once, and a line of `metrics.TIMES` makes a histogram of the time between two.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import msgspec

from nanocore.engine_core.requests.request import Request
from nanocore.engine_core.scheduling.columns import IntArray, Intervals
from nanocore.protocol.messages import Event, FinishReason
from nanocore.protocol.metrics import Phase

logger = logging.getLogger(__name__)

EntryKind = Phase | Literal["first_token", "embedding"]
"""What happens to a request: it enters a phase, or gets its first token, or its embedding."""

# Entries are structs, because making one takes 0.1 µs, and unknown to the garbage collector,
# because nothing that they refer to refers to them.


class RequestEntry(msgspec.Struct, frozen=True, gc=False):
    """What happened to a request, or to one of several samples of it. reason: why it ended."""

    at_s: float
    kind: EntryKind
    request: Request
    reason: FinishReason | None = None


class StepEntry(msgspec.Struct, frozen=True, gc=False):
    """A step whose result is in.

    Args:
        duration_s: time since it was planned, or since the step before it ended if that is later.
        num_running, num_waiting, num_free_blocks: after the step.
        num_preempted, num_completed, decode_ends, decode_counts, chunks: of its `StepPlan`, which
            is not kept as a whole: its many lists would keep the garbage collector busy.
        intervals: inter-token times of its tokens.
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
    num_completed: int
    decode_ends: IntArray
    decode_counts: IntArray | None
    chunks: Sequence[tuple[int, int, int]]
    intervals: Intervals

    @property
    def num_tokens(self) -> int:
        return self.num_decode_tokens + self.num_prefill_tokens


class StepDone(msgspec.Struct, frozen=True, gc=False):
    """The step loop is done with the step that was logged last: its outputs are on their way.

    busy_s: time that the loop was busy with it; with several steps in flight, since the loop was
        done with the one before it.
    """

    busy_s: float


Entry = StepEntry | StepDone | RequestEntry


class Entries(NamedTuple):
    """Entries by kind, the oldest first."""

    steps: list[StepEntry]
    done: list[StepDone]
    requests: list[RequestEntry]


class EngineEvents:
    """Entries that nobody has taken yet.

    append: adds an entry. Called by the step loop alone.
    """

    def __init__(self) -> None:
        self._entries: deque[Entry] = deque()
        self.append: Callable[[Entry], None] = self._entries.append

    def __len__(self) -> int:
        return len(self._entries)

    def subscribe(self, take: Callable[[Entry], None]) -> None:
        """Let a fold take each entry as it is appended, on the step loop's thread."""
        append = self.append

        def append_and_take(entry: Entry) -> None:
            append(entry)
            take(entry)

        self.append = append_and_take

    def take(self) -> Entries:
        """Take all entries; the step loop may append others meanwhile."""
        taken = Entries([], [], [])
        steps, done, requests = taken
        for entry in [self._entries.popleft() for _ in range(len(self._entries))]:
            if isinstance(entry, StepEntry):
                steps.append(entry)
            elif isinstance(entry, StepDone):
                done.append(entry)
            else:
                requests.append(entry)
        return taken

    def end(self, request: Request, end: Event, now_s: float) -> None:
        """Log the end of a request that has no row any more; errors go to the log file, too."""
        assert end.finish_reason is not None
        if end.finish_reason == "error":
            about = {"request_id": request.request_id}
            logger.error("request %r failed: %s", request.request_id, end.message, extra=about)
        self.append(RequestEntry(now_s, "ended", request, end.finish_reason))


class DraftCounters(msgspec.Struct):
    """Totals of drafts whose step's result is in; any thread may read them.

    num_drafts: rows that had some, over all steps; vLLM calls all drafts of a row in a step one.
    accepted_per_pos: how many were right, by their place behind the row's token.
    """

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    accepted_per_pos: list[int] = []

    def count(self, drafted: IntArray, accepted: IntArray) -> None:
        """Count a step's rows with drafts: how many each had, and how many of them were right."""
        self.num_drafts += len(drafted)
        self.num_draft_tokens += int(drafted.sum())
        self.num_accepted_tokens += int(accepted.sum())
        for num_right in accepted.tolist():
            for place in range(num_right):
                self.accepted_per_pos[place] += 1


class SchedulerCounters(msgspec.Struct):
    """Totals since the start, which any thread may read at any time. Samples count as requests.

    dequeued_*: requests that left the queue for good; their submitted tokens, and the bytes that
    they held while they waited, count once for all samples. dequeued_s: when the last one left.
    num_free_rows: rows for requests that arrive now; 0 if the last plan had none for some that
    wait. is_paused: no step is planned for now.
    """

    num_steps: int = 0
    num_preemptions: int = 0
    num_aborts: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    dequeued_reqs: int = 0
    dequeued_tokens: int = 0
    dequeued_bytes: int = 0
    dequeued_s: float = 0.0
    num_free_rows: int = 0
    is_full: bool = False
    is_paused: bool = False

    def count_rows(self, num_free: int, is_full: bool | None = None) -> None:
        """Count free rows. is_full: whether a plan has left requests waiting; None: no new plan."""
        if is_full is not None:
            self.is_full = is_full
        self.num_free_rows = 0 if self.is_full else num_free

    def count_dequeued(self, request: Request, now_s: float) -> None:
        """Count a request when it is first admitted, or when it ends before that."""
        if request.was_admitted:
            return
        # In this order, so that another thread never sees a row free that has been taken.
        self.num_free_rows = max(self.num_free_rows - 1, 0)
        self.dequeued_s = now_s
        self.dequeued_reqs += 1
        if request.sample == 0:
            self.dequeued_tokens += request.num_submitted_tokens
            self.dequeued_bytes += request.num_bytes
