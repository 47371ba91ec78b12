"""Chrome trace events, which Perfetto (ui.perfetto.dev) and chrome://tracing draw.

Each run becomes two processes: the engine, with counters and a track of steps (two, where steps
overlap), and its requests, with a track each, in which the phases are nested slices. Arrows point
from the preempting to the preempted request, and from cached blocks' origin to their user.
Times are whole microseconds, and runs follow each other.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, BinaryIO, Final

import msgspec

from nanocore.tracing.reader import Step
from nanocore.tracing.timeline import PrefillChunk, RequestTimeline, RunTimeline

_BETWEEN_RUNS_US: Final = 1_000_000
_FLUSH_EVENTS: Final = 4096
_encode: Final = msgspec.json.Encoder().encode


class PerfettoWriter:
    """Call `step` for each step, `end_run` after each run, and `close` at the end.

    file: binary, open for writing; stays open.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._events: list[bytes] = []
        self._is_first = True
        self._shift_us = 0
        self._num_flows = 0
        self._begin_run()
        file.write(b'{"displayTimeUnit":"ms","traceEvents":[\n')

    def step(self, run: RunTimeline, step: Step) -> None:
        """Write the step that was just added to the run, and the counters after it."""
        pid = _engine(run.number)
        begin_us, end_us = self._us(step.t_s), self._us(step.end_s)
        lane = self._lane(begin_us, end_us)
        args = {"step": step.step, "tokens": run.num_tokens, "requests": run.num_rows}
        self._slice(pid, lane, (begin_us, end_us), "step", args)
        self._count(pid, "scheduled tokens", begin_us, run.num_tokens)
        self._count(pid, "token budget", begin_us, step.token_budget)
        self._count(pid, "running", end_us, step.num_running)
        self._count(pid, "waiting", end_us, step.num_waiting)
        self._count(pid, "KV blocks used", end_us, step.total_blocks - step.free_blocks)

    def end_run(self, run: RunTimeline) -> None:
        """Write the requests of a settled run."""
        pid = _engine(run.number)
        self._name("process_name", pid, 0, f"engine, run {run.number}")
        self._name("process_name", pid + 1, 0, f"requests, run {run.number}")
        for lane in range(1, len(self._lanes_us) + 1):
            self._name("thread_name", pid, lane, "steps" if lane == 1 else f"steps ({lane})")
        for timeline in run.timelines:
            self._name("thread_name", pid + 1, timeline.number, timeline.id)
            self._timeline(pid + 1, run, timeline)
            self._flows(pid + 1, run, timeline)
        self._shift_us = self._us(run.end_s) + _BETWEEN_RUNS_US
        self._begin_run()

    def close(self) -> None:
        self._flush()
        self._file.write(b"\n]}\n")

    def _begin_run(self) -> None:
        self._lanes_us: list[int] = []  # end of the last step in each
        self._counters: dict[str, int] = {}

    def _us(self, at_s: float) -> int:
        return round(at_s * 1e6) + self._shift_us

    def _lane(self, begin_us: int, end_us: int) -> int:
        """Return the first track that is free: steps in flight at once need one each."""
        for lane, free_us in enumerate(self._lanes_us):
            if free_us <= begin_us:
                self._lanes_us[lane] = end_us
                return lane + 1
        self._lanes_us.append(end_us)
        return len(self._lanes_us)

    def _count(self, pid: int, name: str, ts_us: int, value: int) -> None:
        """Write a counter if its value has changed."""
        if self._counters.get(name) != value:
            self._counters[name] = value
            self._add("C", pid, 0, name, ts=ts_us, args={"value": value})

    def _name(self, kind: str, pid: int, tid: int, name: str) -> None:
        self._add("M", pid, tid, kind, args={"name": name})

    def _slice(
        self, pid: int, tid: int, times_us: tuple[int, int], name: str, args: dict[str, Any]
    ) -> None:
        begin_us, end_us = times_us
        self._add("X", pid, tid, name, ts=begin_us, dur=end_us - begin_us, args=args)

    def _add(self, phase: str, pid: int, tid: int, name: str, **fields: Any) -> None:
        event = {"ph": phase, "pid": pid, "tid": tid, "name": name, **fields}
        self._events.append(_encode(event))
        if len(self._events) >= _FLUSH_EVENTS:
            self._flush()

    def _timeline(self, pid: int, run: RunTimeline, timeline: RequestTimeline) -> None:
        """Write a request's slice, and its phases, each until the next one begins."""
        begin_us = self._us(timeline.begin_s)
        end_us = max(
            begin_us, self._us(run.end_s if timeline.ended_s is None else timeline.ended_s)
        )
        args: dict[str, Any] = {"cached_tokens": timeline.cached_tokens}
        if timeline.arrival is not None:
            for key in ("session", "priority", "prompt_tokens"):
                args[key] = getattr(timeline.arrival, key)
        if timeline.ttft_s is not None:
            args["ttft_ms"] = round(timeline.ttft_s * 1e3, 3)
        self._slice(pid, timeline.number, (begin_us, end_us), timeline.id, args)
        spans = sorted(_spans(run, timeline), key=lambda span: span[0])
        for i, (from_s, to_s, name, args) in enumerate(spans):
            next_us = self._us(spans[i + 1][0]) if i + 1 < len(spans) else end_us
            from_us = min(self._us(from_s), end_us)
            to_us = max(from_us, min(self._us(to_s), next_us, end_us))
            self._slice(pid, timeline.number, (from_us, to_us), name, args)
        if timeline.sent_s is not None:
            sent_us = self._us(timeline.sent_s)
            self._add("i", pid, timeline.number, "first token sent", s="t", ts=sent_us)

    def _flows(self, pid: int, run: RunTimeline, timeline: RequestTimeline) -> None:
        for one in timeline.preemptions:
            other = _alive(run, one.by, one.at_s)
            if other is None or other is timeline:
                continue
            if other.ended_s is None or one.at_s <= other.ended_s:
                self._arrow(pid, "preempts", (other, one.at_s), (timeline, one.at_s))
        if timeline.admitted_s is None:
            return
        for origin_id in timeline.cached_from:
            origin = _alive(run, origin_id, timeline.admitted_s)
            if origin is None or origin is timeline or not origin.work:
                continue
            source = origin, origin.work[0].begin_s
            if source[1] <= timeline.admitted_s:
                self._arrow(pid, "hit", source, (timeline, timeline.admitted_s))

    def _arrow(
        self,
        pid: int,
        name: str,
        source: tuple[RequestTimeline, float],
        target: tuple[RequestTimeline, float],
    ) -> None:
        self._num_flows += 1
        for kind, (timeline, at_s) in (("s", source), ("f", target)):
            bound = {"bp": "e"} if kind == "f" else {}
            flow = {"cat": name, "id": self._num_flows, "ts": self._us(at_s), **bound}
            self._add(kind, pid, timeline.number, name, **flow)

    def _flush(self) -> None:
        if self._events:
            self._file.write((b"" if self._is_first else b",\n") + b",\n".join(self._events))
            self._is_first = False
            self._events.clear()


def _engine(run_number: int) -> int:
    """Return the pid of the engine's track group; that of its requests is the next."""
    return 2 * run_number - 1


def _alive(run: RunTimeline, request_id: str | None, at_s: float) -> RequestTimeline | None:
    """Return the last request with this id that had arrived by then."""
    timelines = run.timelines_of(request_id) if request_id is not None else []
    return next((one for one in reversed(timelines) if one.begin_s <= at_s), None)


def _spans(
    run: RunTimeline, timeline: RequestTimeline
) -> Iterator[tuple[float, float, str, dict[str, Any]]]:
    """Yield (begin, end, name, arguments) of a request's phases."""
    if timeline.arrival is not None:
        queued_s = timeline.arrival.arrived_s
        yield timeline.arrival.received_s, queued_s, "handed over", {}
        ends = (
            one for one in (timeline.admitted_s, timeline.ended_s, run.end_s) if one is not None
        )
        yield queued_s, next(ends), "queued", {}
    for one in timeline.work:
        if isinstance(one, PrefillChunk):
            chunk = {"tokens": one.num_tokens, "computed": one.num_computed}
            yield one.begin_s, one.end_s, "prefill", chunk
        else:
            decodes = {"steps": one.num_steps, "tokens": one.num_tokens}
            yield one.begin_s, one.end_s, "decode", decodes
    for pause in timeline.preemptions:
        end_s = pause.resumed_s
        end_s = end_s if end_s is not None else timeline.ended_s
        cause = {} if pause.by is None else {"by": pause.by}
        yield pause.at_s, run.end_s if end_s is None else end_s, "preempted", cause
