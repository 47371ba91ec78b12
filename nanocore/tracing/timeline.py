"""RunTimeline: one engine's run, built from its steps: request timelines, and when each waited.

All times are seconds of the run's trace. Reading is incremental, so that a long trace is cheap: a
step whose `scheduled` equals that of the step before, bytes for bytes and decodes only, is not
decoded, and of any other step only the differences are processed. A decode span continues until the
request is preempted or ends, even over steps that leave the request out.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from nanocore.tracing.reader import Arrival, Blocked, LostHits, Step, counts


@dataclass(slots=True)
class PrefillChunk:
    """Tokens of a prompt that one step computed, also when recomputing after a preemption."""

    begin_s: float
    end_s: float
    num_tokens: int
    num_computed: int


@dataclass(slots=True)
class DecodeSpan:
    """Consecutive steps that each computed the newest token. num_tokens: no rejected drafts."""

    begin_s: float
    end_s: float
    num_steps: int
    num_tokens: int


@dataclass(slots=True)
class Preemption:
    """by: id of the request that took the row, or its own if it was the last in line itself."""

    at_s: float
    by: str | None
    resumed_s: float | None = None


@dataclass(slots=True)
class RequestTimeline:
    """One request, or one sibling sample.

    arrival: None if it arrived before the trace begins. admitted_s: when it got its first row.
    first_s: end of the step that sampled its first token. sent_s: when the io thread passed that
    on. ended_s: end of its last step. lost: what was not found. is_shared: another session used the
    id at the same time, so events of both are mixed here. num_draft_tokens, num_accepted_tokens:
    drafts computed, and those that were right.
    """

    id: str
    arrival: Arrival | None = None
    admitted_s: float | None = None
    cached_tokens: int = 0
    lost: LostHits | None = None
    work: list[PrefillChunk | DecodeSpan] = field(default_factory=list)
    preemptions: list[Preemption] = field(default_factory=list)
    first_s: float | None = None
    sent_s: float | None = None
    ended_s: float | None = None
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    is_shared: bool = False

    @property
    def begin_s(self) -> float:
        """The earliest time known."""
        if self.arrival is not None:
            return self.arrival.received_s
        times = [one.at_s for one in self.preemptions] + [one.begin_s for one in self.work]
        known = [one for one in (self.admitted_s, self.ended_s, *times) if one is not None]
        return min(known, default=0.0)

    @property
    def ttft_s(self) -> float | None:
        """Time from SUBMIT to the first token, at the socket if that is known."""
        if self.first_s is None:
            return None
        end_s = self.first_s if self.sent_s is None else self.sent_s
        return max(0.0, end_s - self.begin_s)

    @property
    def num_computed(self) -> int:
        """Computed tokens since the request last got a row, cached ones included."""
        num_decoded = 0
        for one in reversed(self.work):
            if isinstance(one, PrefillChunk):
                return one.num_computed + one.num_tokens + num_decoded
            num_decoded += one.num_tokens
        return num_decoded

    @property
    def chunks(self) -> list[PrefillChunk]:
        return [one for one in self.work if isinstance(one, PrefillChunk)]


class StepTimes(NamedTuple):
    """A step as seen by waiting requests. blocked: the first in line, if any."""

    begin_s: float
    end_s: float
    blocked: Blocked | None


class RunTimeline:
    """number: of the run in its file, from 1. timelines: in order of arrival.

    end_s: end of the last step, or of the last output. num_rows, num_tokens: computed by the last
    step; total_tokens: by all.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.timelines: list[RequestTimeline] = []
        self.steps: list[StepTimes] = []
        self.end_s = 0.0
        self.num_rows = self.num_tokens = 0
        self.total_tokens = self.max_running = self.max_waiting = 0
        self.max_kv_usage = 0.0
        self._by_id: dict[str, list[RequestTimeline]] = {}
        self._prefilling: dict[str, int] = {}  # prompt tokens to compute before decoding
        self._known: dict[str, int] = {}  # the same, of preempted requests
        self._decodes: dict[str, int] = {}  # tokens of each request that the last step decoded
        self._runs: dict[str, DecodeSpan] = {}  # spans that may continue
        self._since: dict[str, int] = {}  # first step that an entry of `_decodes` is valid for
        self._last = msgspec.Raw(b"")
        self._had_chunks = False

    def timelines_of(self, request_id: str) -> list[RequestTimeline]:
        """Return all requests with this id, in order of arrival."""
        return self._by_id.get(request_id, [])

    def request_ids(self) -> list[str]:
        return list(self._by_id)

    def add(self, step: Step) -> None:
        end_s = step.end_s
        self.steps.append(StepTimes(step.t_s, end_s, step.blocked))
        self.end_s = max(self.end_s, end_s)
        finished = self._take_arrivals(step) if step.arrived else step.finished
        if step.preempted:
            self._leave_rows(step)
        if step.new or step.resumed:
            self._enter_rows(step)
        if self._had_chunks or self._prefilling or step.scheduled != self._last:
            self._compute(step)
        if step.accepted:
            self._verify(step.accepted)
        self.total_tokens += self.num_tokens
        self.max_running = max(self.max_running, step.num_running)
        self.max_waiting = max(self.max_waiting, step.num_waiting)
        if step.total_blocks:
            usage = 1 - step.free_blocks / step.total_blocks
            self.max_kv_usage = max(self.max_kv_usage, usage)
        for request_id in step.first:
            timeline = self._timeline(request_id)
            if timeline.first_s is None:
                timeline.first_s = end_s
        if step.sent:
            self._take_sent(step)
        for request_id in finished:
            self._end(self._timeline(request_id), end_s)

    def settle(self) -> None:
        """Complete the decode spans after the last step."""
        for request_id in list(self._decodes):
            self._pause(request_id, len(self.steps))

    def _take_sent(self, step: Step) -> None:
        for request_id, at_s in step.sent.items():
            for timeline in reversed(self.timelines_of(request_id)):
                if timeline.first_s is not None and timeline.sent_s is None:
                    timeline.sent_s = at_s
                    self.end_s = max(self.end_s, at_s)
                    break

    def _take_arrivals(self, step: Step) -> list[str]:
        """Return ids that end with this step, except those that a new request takes over."""
        finished = step.finished
        for arrival in step.arrived:
            before = self.timelines_of(arrival.id)
            is_open = bool(before) and before[-1].ended_s is None
            if is_open and arrival.id in finished:
                finished = [*finished]
                finished.remove(arrival.id)
                self._end(before[-1], step.end_s)
                is_open = False
            self._begin(arrival.id, arrival).is_shared = is_open
        return finished

    def _leave_rows(self, step: Step) -> None:
        for request_id in step.preempted:
            timeline = self._timeline(request_id)
            timeline.preemptions.append(Preemption(step.t_s, step.preempted_by.get(request_id)))
            self._pause(request_id, len(self.steps) - 1)
            self._runs.pop(request_id, None)
            target = self._prefilling.pop(request_id, 0)
            self._known[request_id] = max(target, timeline.num_computed)

    def _enter_rows(self, step: Step) -> None:
        for request_id in step.new:
            timeline = self._timeline(request_id)
            timeline.admitted_s = step.t_s
            timeline.cached_tokens = step.cached.get(request_id, 0)
            timeline.lost = step.lost.get(request_id)
            self._prefilling[request_id] = timeline.arrival.prompt_tokens if timeline.arrival else 0
        for request_id in step.resumed:
            timeline = self._timeline(request_id)
            if timeline.preemptions:
                timeline.preemptions[-1].resumed_s = step.t_s
            self._prefilling[request_id] = self._known.pop(request_id, 0)

    def _compute(self, step: Step) -> None:
        self._last = step.scheduled
        scheduled = counts(step.scheduled)
        self.num_rows, self.num_tokens = len(scheduled), sum(scheduled.values())
        if not self._prefilling.keys().isdisjoint(scheduled):
            self._add_chunks(step, scheduled)
        self._had_chunks = len(scheduled) < self.num_rows
        decodes = self._decodes
        if scheduled == decodes:
            return
        num_steps = len(self.steps) - 1
        for request_id, _ in decodes.items() - scheduled.items():
            self._pause(request_id, num_steps)
        for request_id, count in sorted(scheduled.items() - decodes.items()):
            decodes[request_id] = count
            self._since[request_id] = num_steps
            if request_id not in self._runs:
                run = self._runs[request_id] = DecodeSpan(step.t_s, step.end_s, 0, 0)
                self._timeline(request_id).work.append(run)

    def _verify(self, accepted: dict[str, int]) -> None:
        """Count the drafts of the step that was computed last, and take back the rejected ones."""
        for request_id in accepted.keys() & self._decodes.keys():
            num_drafts = self._decodes[request_id] - 1
            num_right = min(accepted[request_id], num_drafts)
            self._runs[request_id].num_tokens -= num_drafts - num_right
            timeline = self._timeline(request_id)
            timeline.num_draft_tokens += num_drafts
            timeline.num_accepted_tokens += num_right

    def _pause(self, request_id: str, num_steps: int) -> None:
        """Count the decodes of a request up to this step; its span may continue later."""
        count = self._decodes.pop(request_id, None)
        if count is None:
            return
        more = num_steps - self._since.pop(request_id)
        run = self._runs[request_id]
        run.num_steps += more
        run.num_tokens += more * count
        run.end_s = self.steps[num_steps - 1].end_s

    def _add_chunks(self, step: Step, scheduled: dict[str, int]) -> None:
        """Move prefills out of `scheduled`; one token of an unknown prompt is a decode."""
        computed = counts(step.computed)
        for request_id, target in list(self._prefilling.items()):
            if (count := scheduled.get(request_id)) is None:
                continue
            timeline = self._timeline(request_id)
            is_known = timeline.arrival is not None
            is_decode = count == 1 or request_id in step.accepted
            if not is_known and is_decode and timeline.work:
                del self._prefilling[request_id]
                continue
            del scheduled[request_id]
            num_before = computed.get(request_id, 0)
            timeline.work.append(PrefillChunk(step.t_s, step.end_s, count, num_before))
            if num_before + count >= target and (is_known or count == 1):
                del self._prefilling[request_id]

    def _timeline(self, request_id: str) -> RequestTimeline:
        """Return the current request with this id; it may have arrived before the trace begins."""
        timelines = self._by_id.get(request_id)
        return timelines[-1] if timelines else self._begin(request_id, None)

    def _begin(self, request_id: str, arrival: Arrival | None) -> RequestTimeline:
        timeline = RequestTimeline(request_id, arrival)
        self.timelines.append(timeline)
        self._by_id.setdefault(request_id, []).append(timeline)
        return timeline

    def _end(self, timeline: RequestTimeline, end_s: float) -> None:
        timeline.ended_s = end_s
        self._pause(timeline.id, len(self.steps))
        self._runs.pop(timeline.id, None)
        self._prefilling.pop(timeline.id, None)
        self._known.pop(timeline.id, None)
