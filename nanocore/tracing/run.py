"""One engine's run, made of its steps: the lives of its requests, and who was first in line when.

A step that schedules byte for byte what the one before did, decodes only, is counted and not looked
at, so a long trace costs its changes. A row's decode run goes on until the request is preempted or
ends, also over steps that leave it out.
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
    """number: of the run in its file, from 1. has_arrivals: its engine told when requests came."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.lives: list[Life] = []
        self.steps: list[StepTimes] = []
        self.has_arrivals = False
        self._by_id: dict[str, list[Life]] = {}
        self._targets: dict[int, int] = {}  # tokens to compute before it decodes, by life's number
        self._known: dict[int, int] = {}  # tokens of those that were preempted, likewise
        self._last = msgspec.Raw(b"")
        self._decoding: list[tuple[DecodeRun, int]] = []  # with its tokens, in the last step
        self._runs: dict[int, DecodeRun] = {}  # that may go on, by life's number
        self._is_steady = False
        self._num_repeats = 0
        self._repeated_end_s = 0.0
        self._end_s = 0.0

    @property
    def end_s(self) -> float:
        """When the last step, or the last output, was through."""
        return self._end_s

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
        self.has_arrivals |= step.first is not None
        changes = step.new or step.resumed or step.preempted or step.finished or step.first
        if self._is_steady and not changes and step.scheduled == self._last:
            self._num_repeats += 1
            self._repeated_end_s = end_s
            self._take_messages(step)
            self._end_s = max(self._end_s, end_s)
            return
        self.settle()
        self._end_s = max(self._end_s, end_s)
        finished = self._take_messages(step)
        self._leave_rows(step)
        self._enter_rows(step)
        self._compute(step, end_s)
        for request_id in step.first or ():
            life = self._life(request_id)
            if life.first_s is None:
                life.first_s = end_s
        for request_id in finished:
            self._end(self._life(request_id), end_s)

    def settle(self) -> None:
        """Count the steps that repeated the last one that was looked at. Last of all, too."""
        if self._num_repeats:
            for decode, count in self._decoding:
                decode.num_steps += self._num_repeats
                decode.num_tokens += self._num_repeats * count
                decode.end_s = max(decode.end_s, self._repeated_end_s)
            self._num_repeats = 0

    def _take_messages(self, step: Step) -> list[str]:
        """Sent outputs and arrivals; returns who else ends with the step."""
        for request_id, at_s in step.sent.items():
            for life in reversed(self.lives_of(request_id)):
                if life.first_s is not None and life.sent_s is None:
                    life.sent_s = at_s
                    self._end_s = max(self._end_s, at_s)
                    break
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
            self._runs.pop(life.number, None)
            target = self._targets.pop(life.number, 0)
            self._known[life.number] = max(target, life.num_computed)

    def _enter_rows(self, step: Step) -> None:
        for request_id in step.new:
            life = self._life(request_id)
            life.admitted_s = step.t_s
            life.cached_tokens = step.cached.get(request_id, 0)
            life.cached_from = step.cached_from.get(request_id, [])
            self._targets[life.number] = life.arrival.prompt_tokens if life.arrival else 0
        for request_id in step.resumed:
            life = self._life(request_id)
            if life.preemptions:
                life.preemptions[-1].resumed_s = step.t_s
            self._targets[life.number] = self._known.get(life.number, 0)

    def _compute(self, step: Step, end_s: float) -> None:
        """Give each request its part of the step."""
        self._last = step.scheduled
        self._decoding = []
        scheduled = counts(step.scheduled)
        computed: dict[str, int] | None = None
        for request_id, count in scheduled.items():
            life = self._life(request_id)
            if life.number in self._targets:
                computed = counts(step.computed) if computed is None else computed
                if self._add_chunk(life, step, count, computed.get(request_id, 0)):
                    continue
            decode = self._runs.get(life.number)
            if decode is None:
                decode = self._runs[life.number] = DecodeRun(step.t_s, end_s, 0, 0)
                life.work.append(decode)
            decode.num_steps += 1
            decode.num_tokens += count
            decode.end_s = max(decode.end_s, end_s)
            self._decoding.append((decode, count))
        self._is_steady = len(self._decoding) == len(scheduled)

    def _add_chunk(self, life: Life, step: Step, count: int, num_computed: int) -> bool:
        """Whether it is one. Without the prompt's length, a single token behind others is not."""
        target = self._targets[life.number]
        is_told = life.arrival is not None
        if not is_told and count == 1 and life.chunks:
            del self._targets[life.number]
            return False
        life.work.append(Chunk(step.t_s, step.end_s, count, num_computed))
        if num_computed + count >= target and (is_told or count == 1):
            del self._targets[life.number]
            if step.first is None and life.first_s is None:  # an older engine's
                life.first_s = step.end_s
        return True

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
        self._runs.pop(life.number, None)
        self._targets.pop(life.number, None)
