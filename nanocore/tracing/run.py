"""One engine's run, made of its steps: the lives of its requests, and who was first in line when.

A long trace costs its changes: a step that schedules byte for byte what the one before did, decodes
only, is not looked into, and of another only what differs is. A decode run goes on until the
request is preempted or ends, also over steps that leave it out.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from nanocore.tracing.life import Chunk, DecodeRun, Life, Preemption
from nanocore.tracing.step import Arrival, Blocked, Step, counts


class StepTimes(NamedTuple):
    """A step, as those see it that wait. blocked: who was first in line, if anybody was."""

    begin_s: float
    end_s: float
    blocked: Blocked | None


class Run:
    """number: of the run in its file, from 1. lives: in the order in which they came.

    end_s: when the last step, or the last output, was through. has_arrivals: its engine told when
    requests came. num_rows, num_tokens: that the last step computed.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.lives: list[Life] = []
        self.steps: list[StepTimes] = []
        self.end_s = 0.0
        self.has_arrivals = False
        self.num_rows = self.num_tokens = 0
        self._by_id: dict[str, list[Life]] = {}
        self._prefilling: dict[str, int] = {}  # tokens to compute before it decodes
        self._known: dict[str, int] = {}  # likewise, of those that were preempted
        self._decodes: dict[str, int] = {}  # tokens of those that the last step decoded
        self._runs: dict[str, DecodeRun] = {}  # that may go on
        self._since: dict[str, int] = {}  # the step from which `_decodes` is true of it
        self._last = msgspec.Raw(b"")
        self._had_chunks = False

    def lives_of(self, request_id: str) -> list[Life]:
        """Those that bore an id, in the order in which they came."""
        return self._by_id.get(request_id, [])

    def request_ids(self) -> list[str]:
        """All, in the order in which they came."""
        return list(self._by_id)

    def add(self, step: Step) -> None:
        """The next step of the run."""
        end_s = step.end_s
        self.steps.append(StepTimes(step.t_s, end_s, step.blocked))
        self.end_s = max(self.end_s, end_s)
        self.has_arrivals |= step.first is not None
        finished = self._take_arrivals(step) if step.arrived else step.finished
        if step.preempted:
            self._leave_rows(step)
        if step.new or step.resumed:
            self._enter_rows(step)
        if self._had_chunks or self._prefilling or step.scheduled != self._last:
            self._compute(step)
        for request_id in step.first or ():
            life = self._life(request_id)
            if life.first_s is None:
                life.first_s = end_s
        if step.sent:
            self._take_sent(step)
        for request_id in finished:
            self._end(self._life(request_id), end_s)

    def settle(self) -> None:
        """The run is read as far as it goes: count what its last steps decoded."""
        for request_id in list(self._decodes):
            self._pause(request_id, len(self.steps))

    def _take_sent(self, step: Step) -> None:
        for request_id, at_s in step.sent.items():
            for life in reversed(self.lives_of(request_id)):
                if life.first_s is not None and life.sent_s is None:
                    life.sent_s = at_s
                    self.end_s = max(self.end_s, at_s)
                    break

    def _take_arrivals(self, step: Step) -> list[str]:
        """Returns who ends with the step, but for those whose ids are taken anew in it."""
        finished = step.finished
        for arrival in step.arrived:
            before = self.lives_of(arrival.id)
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
            life = self._life(request_id)
            life.preemptions.append(Preemption(step.t_s, step.preempted_by.get(request_id)))
            self._pause(request_id, len(self.steps) - 1)
            self._runs.pop(request_id, None)
            target = self._prefilling.pop(request_id, 0)
            self._known[request_id] = max(target, life.num_computed)

    def _enter_rows(self, step: Step) -> None:
        for request_id in step.new:
            life = self._life(request_id)
            life.admitted_s = step.t_s
            life.cached_tokens = step.cached.get(request_id, 0)
            life.cached_from = step.cached_from.get(request_id, [])
            self._prefilling[request_id] = life.arrival.prompt_tokens if life.arrival else 0
        for request_id in step.resumed:
            life = self._life(request_id)
            if life.preemptions:
                life.preemptions[-1].resumed_s = step.t_s
            self._prefilling[request_id] = self._known.pop(request_id, 0)

    def _compute(self, step: Step) -> None:
        """Give each request its part of the step."""
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
                run = self._runs[request_id] = DecodeRun(step.t_s, step.end_s, 0, 0)
                self._life(request_id).work.append(run)

    def _pause(self, request_id: str, num_steps: int) -> None:
        """It has decoded up to this step, as far as the last ones did; perhaps it goes on later."""
        count = self._decodes.pop(request_id, None)
        if count is None:
            return
        more = num_steps - self._since.pop(request_id)
        run = self._runs[request_id]
        run.num_steps += more
        run.num_tokens += more * count
        run.end_s = self.steps[num_steps - 1].end_s

    def _add_chunks(self, step: Step, scheduled: dict[str, int]) -> None:
        """Take out what is computed of prompts. Without a prompt's length one token is a decode."""
        computed = counts(step.computed)
        for request_id, target in list(self._prefilling.items()):
            if (count := scheduled.get(request_id)) is None:
                continue
            life = self._life(request_id)
            is_told = life.arrival is not None
            if not is_told and count == 1 and life.work:
                del self._prefilling[request_id]
                continue
            del scheduled[request_id]
            num_before = computed.get(request_id, 0)
            life.work.append(Chunk(step.t_s, step.end_s, count, num_before))
            if num_before + count >= target and (is_told or count == 1):
                del self._prefilling[request_id]
            if step.first is None and life.first_s is None:  # an older engine's; about then
                life.first_s = step.end_s

    def _life(self, request_id: str) -> Life:
        """The one that bears the id now; it may have come before the trace begins."""
        lives = self._by_id.get(request_id)
        return lives[-1] if lives else self._begin(request_id, None)

    def _begin(self, request_id: str, arrival: Arrival | None) -> Life:
        life = Life(request_id, len(self.lives) + 1, arrival)
        self.lives.append(life)
        self._by_id.setdefault(request_id, []).append(life)
        return life

    def _end(self, life: Life, end_s: float) -> None:
        life.ended_s = end_s
        self._pause(life.id, len(self.steps))
        self._runs.pop(life.id, None)
        self._prefilling.pop(life.id, None)
        self._known.pop(life.id, None)
