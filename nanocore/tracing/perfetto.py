"""Chrome trace events, which Perfetto (ui.perfetto.dev) and chrome://tracing draw.

Each run of the file is two processes: its engine, with a track of steps (two, where steps overlap)
and counters; and its requests, with a track for each: one slice for its life, and in it what it did
at a time. Arrows go from who preempted to whom, and from who computed blocks to who hit them.
Times are whole microseconds, and runs follow each other. Events are made as text: there are many.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import BinaryIO, Final

import msgspec

from nanocore.tracing.life import Chunk, Life
from nanocore.tracing.run import Run
from nanocore.tracing.step import Step

_BETWEEN_RUNS_US: Final = 1_000_000
_FLUSH_EVENTS: Final = 4096
_quoted = msgspec.json.Encoder().encode


class PerfettoWriter:
    """Writes one file: `step` for each step, `end_run` behind those of a run, `close` at the end.

    file: binary, open for writing; stays open.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._events: list[str] = []
        self._is_first = True
        self._shift_us = 0
        self._num_flows = 0
        self._begin_run()
        file.write(b'{"displayTimeUnit":"ms","traceEvents":[\n')

    def step(self, run: Run, step: Step) -> None:
        """The step that a run has just been given, and how the counters stand with it."""
        pid = _engine(run.number)
        begin_us, end_us = self._us(step.t_s), self._us(step.end_s)
        lane = self._lane(begin_us, end_us)
        add = self._events.append
        add(
            f'{{"ph":"X","pid":{pid},"tid":{lane},"ts":{begin_us},"dur":{end_us - begin_us},'
            f'"name":"step","args":{{"step":{step.step},"tokens":{run.num_tokens},'
            f'"requests":{run.num_rows}}}}}'
        )
        self._count(pid, "scheduled tokens", begin_us, run.num_tokens)
        self._count(pid, "token budget", begin_us, step.token_budget)
        self._count(pid, "running", end_us, step.num_running)
        self._count(pid, "waiting", end_us, step.num_waiting)
        self._count(pid, "KV blocks used", end_us, step.total_blocks - step.free_blocks)
        if len(self._events) >= _FLUSH_EVENTS:
            self._flush()

    def end_run(self, run: Run) -> None:
        """The tracks of its requests; the run is settled."""
        pid = _engine(run.number)
        self._name("process_name", pid, 0, f"engine, run {run.number}")
        self._name("process_name", pid + 1, 0, f"requests, run {run.number}")
        for lane in range(1, len(self._lanes_us) + 1):
            self._name("thread_name", pid, lane, "steps" if lane == 1 else f"steps ({lane})")
        for life in run.lives:
            self._name("thread_name", pid + 1, life.number, life.id)
            self._life(pid + 1, run, life)
            self._flows(pid + 1, run, life)
            if len(self._events) >= _FLUSH_EVENTS:
                self._flush()
        self._shift_us = self._us(run.end_s) + _BETWEEN_RUNS_US
        self._begin_run()

    def close(self) -> None:
        """The file is complete."""
        self._flush()
        self._file.write(b"\n]}\n")

    def _begin_run(self) -> None:
        self._lanes_us: list[int] = []  # when each is free
        self._counters: dict[str, int] = {}

    def _us(self, at_s: float) -> int:
        return round(at_s * 1e6) + self._shift_us

    def _lane(self, begin_us: int, end_us: int) -> int:
        """Steps that are in flight at once are drawn on tracks of their own."""
        for lane, free_us in enumerate(self._lanes_us):
            if free_us <= begin_us:
                self._lanes_us[lane] = end_us
                return lane + 1
        self._lanes_us.append(end_us)
        return len(self._lanes_us)

    def _count(self, pid: int, name: str, ts_us: int, value: int) -> None:
        """A counter that has another value than before."""
        if self._counters.get(name) != value:
            self._counters[name] = value
            self._events.append(
                f'{{"ph":"C","pid":{pid},"tid":0,"ts":{ts_us},"name":"{name}",'
                f'"args":{{"value":{value}}}}}'
            )

    def _name(self, kind: str, pid: int, tid: int, name: str) -> None:
        text = _quoted(name).decode()
        self._events.append(
            f'{{"ph":"M","pid":{pid},"tid":{tid},"name":"{kind}","args":{{"name":{text}}}}}'
        )

    def _slice(self, pid: int, tid: int, times_us: tuple[int, int], name: str, args: str) -> None:
        begin_us, end_us = times_us
        self._events.append(
            f'{{"ph":"X","pid":{pid},"tid":{tid},"ts":{begin_us},"dur":{end_us - begin_us},'
            f'"name":{name},"args":{{{args}}}}}'
        )

    def _life(self, pid: int, run: Run, life: Life) -> None:
        """Its slice, and in it what it did, each until the next thing begins."""
        begin_us = self._us(life.begin_s)
        end_us = max(begin_us, self._us(run.end_s if life.ended_s is None else life.ended_s))
        args = f'"cached_tokens":{life.cached_tokens}'
        if life.arrival is not None:
            args += f',"session":{life.arrival.session},"priority":{life.arrival.priority}'
            args += f',"prompt_tokens":{life.arrival.prompt_tokens}'
        if life.ttft_s is not None:
            args += f',"ttft_ms":{life.ttft_s * 1e3:.3f}'
        self._slice(pid, life.number, (begin_us, end_us), _quoted(life.id).decode(), args)
        spans = sorted(_spans(run, life), key=lambda span: span[0])
        for i, (from_s, to_s, name, args) in enumerate(spans):
            next_us = self._us(spans[i + 1][0]) if i + 1 < len(spans) else end_us
            from_us = min(self._us(from_s), end_us)
            to_us = max(from_us, min(self._us(to_s), next_us, end_us))
            self._slice(pid, life.number, (from_us, to_us), f'"{name}"', args)
        if life.sent_s is not None:
            self._events.append(
                f'{{"ph":"i","s":"t","pid":{pid},"tid":{life.number},'
                f'"ts":{self._us(life.sent_s)},"name":"first token sent"}}'
            )

    def _flows(self, pid: int, run: Run, life: Life) -> None:
        for one in life.preemptions:
            other = _alive(run, one.by, one.at_s)
            if other is None or other is life:
                continue
            if other.ended_s is None or one.at_s <= other.ended_s:
                self._arrow(pid, "preempts", (other, one.at_s), (life, one.at_s))
        if life.admitted_s is None:
            return
        for origin_id in life.cached_from:
            origin = _alive(run, origin_id, life.admitted_s)
            if origin is None or origin is life or not origin.work:
                continue
            source = origin, origin.work[0].begin_s
            if source[1] <= life.admitted_s:
                self._arrow(pid, "hit", source, (life, life.admitted_s))

    def _arrow(
        self, pid: int, name: str, source: tuple[Life, float], target: tuple[Life, float]
    ) -> None:
        self._num_flows += 1
        for kind, (life, at_s) in (("s", source), ("f", target)):
            bound = ',"bp":"e"' if kind == "f" else ""
            self._events.append(
                f'{{"ph":"{kind}","cat":"{name}","name":"{name}","id":{self._num_flows},'
                f'"pid":{pid},"tid":{life.number},"ts":{self._us(at_s)}{bound}}}'
            )

    def _flush(self) -> None:
        if self._events:
            text = ",\n".join(self._events)
            self._file.write(("" if self._is_first else ",\n").encode() + text.encode())
            self._is_first = False
            self._events.clear()


def _engine(run_number: int) -> int:
    """The engine's process; the next one is that of its requests."""
    return 2 * run_number - 1


def _alive(run: Run, request_id: str | None, at_s: float) -> Life | None:
    """The last that bore the id and had come by then."""
    lives = run.lives_of(request_id) if request_id is not None else []
    return next((one for one in reversed(lives) if one.begin_s <= at_s), None)


def _spans(run: Run, life: Life) -> Iterator[tuple[float, float, str, str]]:
    """(begin, end, name, arguments) of what a request did."""
    if life.arrival is not None:
        queued_s = life.arrival.arrived_s
        yield life.arrival.received_s, queued_s, "handed over", ""
        ends = (one for one in (life.admitted_s, life.ended_s, run.end_s) if one is not None)
        yield queued_s, next(ends), "queued", ""
    for one in life.work:
        if isinstance(one, Chunk):
            args = f'"tokens":{one.num_tokens},"computed":{one.num_computed}'
            yield one.begin_s, one.end_s, "prefill", args
        else:
            args = f'"steps":{one.num_steps},"tokens":{one.num_tokens}'
            yield one.begin_s, one.end_s, "decode", args
    for pause in life.preemptions:
        end_s = pause.resumed_s
        end_s = end_s if end_s is not None else life.ended_s
        args = "" if pause.by is None else f'"by":{_quoted(pause.by).decode()}'
        yield pause.at_s, run.end_s if end_s is None else end_s, "preempted", args
