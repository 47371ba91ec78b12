"""Recent steps and ways of requests, of a scheduler whose clock a test moves."""

from __future__ import annotations

import json
import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nanocore.engine_core.log.event_log import RequestEntry, StepDone
from nanocore.engine_core.log.history import MAX_ENDED, MAX_OPEN, MAX_STEPS, RequestLife
from nanocore.engine_core.log.metrics import IoCounts
from nanocore.engine_core.log.trace import StepTrace
from nanocore.engine_core.requests.request import Request
from nanocore.protocol.messages import Event
from nanocore.protocol.metrics import MAX_MOVES, RecentSteps, RequestPhases
from tests.engine_core.log.clocked_engine import Engine
from tests.fakes import make_request

CLIENT = 1
FOLLOWS = {
    "queued": {"prefill", "ended"},
    "prefill": {"decode", "preempted", "ended"},
    "decode": {"preempted", "ended"},
    "preempted": {"prefill", "ended"},
    "ended": set(),
}


def recent(engine: Engine, after: int = 0, client: int = CLIENT) -> RecentSteps:
    return engine.collector.recent_steps(after, client, IoCounts())


def ways(engine: Engine) -> dict[int, RequestPhases]:
    return {way.handle: way for way in recent(engine).requests}


def end(engine: Engine, request: Request) -> None:
    """As the step loop ends what a client aborts."""
    assert engine.scheduler.abort(request.handle) is request
    event = Event(handle=request.handle, finish_reason="abort")
    engine.scheduler.log.end(request, event, engine.now_s)


def test_a_request_goes_from_the_queue_through_its_chunks_to_its_end() -> None:
    engine = Engine(max_num_seqs=4, max_num_batched_tokens=4)
    engine.add(make_request(1, [1] * 10, 3))
    engine.now_s += 5  # it waits
    way: list[tuple[str, float]] = [("queued", 100.0)]
    assert ways(engine)[1].way == way
    for phases, num_outputs in (
        ([("prefill", 105.0)], 0),
        ([], 0),
        ([("decode", 108.0)], 1),
        ([], 2),
        ([("ended", 110.0)], 3),
    ):
        engine.step()
        way += phases
        told = ways(engine)[1]
        assert (told.way, told.num_output_tokens) == (way, num_outputs)
    assert (told.num_prompt_tokens, told.finish_reason) == (10, "length")
    columns = recent(engine).steps
    assert columns.number == [1, 2, 3, 4, 5]
    assert columns.ended_s == [106.0, 107.0, 108.0, 109.0, 110.0]
    assert columns.duration_s == [1.0] * 5
    assert columns.num_prefill_tokens == [4, 4, 2, 0, 0]
    assert columns.num_decode_tokens == [0, 0, 0, 1, 1]
    assert columns.num_running == [1, 1, 1, 1, 0]
    assert columns.num_waiting == columns.num_preempted == [0] * 5
    assert columns.num_used_blocks == [1, 2, 3, 3, 0]


def test_a_step_lasts_from_its_plan_or_from_the_end_of_the_one_before_it() -> None:
    engine = Engine()
    engine.add(make_request(1, [1], 3))
    engine.now_s += 50  # nothing is planned
    engine.step(2)
    first = engine.executor.execute(engine.scheduler.schedule())
    engine.now_s += 1
    second = engine.executor.execute(engine.scheduler.schedule())  # the first is in flight
    for result, seconds in ((first, 4), (second, 3)):
        engine.now_s += seconds
        engine.scheduler.update(result)
    assert recent(engine).steps.duration_s == [2.0, 5.0, 3.0]


def test_what_ends_with_its_first_token_never_decoded() -> None:
    engine = Engine()
    engine.add(make_request(1, [1] * 5, 1))
    engine.add(make_request(2, [2] * 5, 1, pooling="last"))
    engine.step()
    for way in ways(engine).values():
        assert way.way == [("queued", 100.0), ("prefill", 100.0), ("ended", 101.0)]


def test_a_request_that_is_preempted_goes_back_to_prefill_and_on() -> None:
    engine = Engine(num_blocks=6, enable_prefix_caching=False)
    for handle in (1, 2):
        engine.add(make_request(handle, [1] * 8, 8))
    while engine.scheduler.num_requests:
        engine.step()
    phases = [[phase for phase, _ in way.way] for way in ways(engine).values()]
    usual = ["queued", "prefill", "decode", "ended"]
    assert sorted(phases, key=len) == [usual, [*usual[:3], "preempted", *usual[1:]]]
    (way,) = [one for one in ways(engine).values() if len(one.way) > 4]
    (_, lost_s), (_, again_s), (_, on_s) = way.way[3:6]
    columns = recent(engine).steps
    at = columns.num_preempted.index(1)
    assert sum(columns.num_preempted) == 1
    assert lost_s == columns.ended_s[at] - columns.duration_s[at], "it was lost by the plan"
    assert lost_s < again_s < on_s == again_s + 1
    assert columns.num_waiting[at] == 1
    known = way.num_prompt_tokens + sum(columns.ended_s[i] <= lost_s for i in range(at))
    assert columns.num_prefill_tokens[columns.ended_s.index(on_s)] == known


def test_what_is_lost_in_flight_did_not_decode() -> None:
    """The step that completes a prompt is under way when the request is preempted."""
    engine = Engine(num_blocks=4, enable_prefix_caching=False)
    scheduler = engine.scheduler
    early = engine.add(make_request(1, [1] * 4, 12))
    engine.step()
    late = engine.add(make_request(2, [2] * 8, 4))
    first = engine.executor.execute(scheduler.schedule())
    scheduler.running.preempt(late)
    scheduler.log.append(RequestEntry(engine.now_s, "preempted", late))
    scheduler.waiting.push(late)
    engine.now_s += 1
    scheduler.update(first)
    phases = {handle: [phase for phase, _ in way.way] for handle, way in ways(engine).items()}
    assert phases[late.handle] == ["queued", "prefill", "preempted"]
    assert phases[early.handle] == ["queued", "prefill", "decode"]


def test_what_is_aborted_in_the_queue_has_only_waited() -> None:
    engine = Engine(max_num_seqs=1)
    engine.add(make_request(1, [1] * 4, 9))
    waits = engine.add(make_request(2, [1] * 4, 9))
    engine.step()
    end(engine, waits)
    way = ways(engine)[2]
    assert way.way == [("queued", 100.0), ("ended", 101.0)]
    assert (way.finish_reason, way.num_output_tokens, way.num_cached_tokens) == ("abort", 0, 0)
    assert ways(engine)[1].finish_reason is None


def test_the_queue_begins_with_the_submit() -> None:
    engine = Engine()
    request = make_request(1, [1], 1)
    request.received_s = 70.0
    engine.scheduler.add(request)
    assert ways(engine)[1].way == [("queued", 70.0)]


def test_each_sample_has_a_way_under_the_requests_name() -> None:
    engine = Engine()
    engine.add(make_request(1, [1] * 9, 4, n=3))
    engine.step()
    told = ways(engine)
    assert {way.request_id for way in told.values()} == {"r1"}
    assert [told[handle].num_cached_tokens for handle in (1, 2, 3)] == [0, 8, 8]
    for _ in range(3):
        engine.step()
    assert [told.num_output_tokens for told in ways(engine).values()] == [4, 4, 4]
    assert {way.finish_reason for way in ways(engine).values()} == {"length"}


def test_outputs_of_an_earlier_run_are_not_counted_again() -> None:
    engine = Engine()
    request = engine.add(make_request(1, [1] * 5, 6, outputs=[7, 7]))
    assert ways(engine)[1].num_output_tokens == 0
    engine.step()
    told = ways(engine)[1]
    assert (told.num_prompt_tokens, told.num_output_tokens) == (5, 1)
    engine.scheduler.running.preempt(request)
    assert ways(engine)[1].num_output_tokens == 1, "its tokens are with it, while it waits"


def test_many_phases_keep_their_beginning_and_their_end() -> None:
    request = make_request(1, [1], 1)
    life = RequestLife(request)
    for i in range(5 * MAX_MOVES):
        life.take(RequestEntry(float(i), "preempted" if i else "queued", request))
    assert len(life.phases) == MAX_MOVES
    assert [at_s for _, at_s in life.phases[:2]] == [0, 4 * MAX_MOVES + 1]
    assert life.phases[-1] == ("preempted", 5 * MAX_MOVES - 1)


def test_what_is_kept_is_bounded_whether_or_not_anybody_looks() -> None:
    engine = Engine(max_num_seqs=1)
    num_requests, num_tokens = MAX_ENDED + 10, 10
    for handle in range(1, num_requests + 1):
        engine.add(make_request(handle, [1], num_tokens))
    while engine.scheduler.num_requests:
        engine.step()
        engine.collector.fold()  # as the io thread does once a second
    kept = engine.collector._history
    assert (len(kept.steps), len(kept.ended)) == (MAX_STEPS, MAX_ENDED)
    assert not kept.open
    assert not len(engine.scheduler.log)
    told = recent(engine)
    last = num_requests * num_tokens
    assert told.steps.number == [*range(last - MAX_STEPS + 1, last + 1)]
    handles = [way.handle for way in told.requests]
    assert handles == [*range(num_requests - MAX_ENDED + 1, num_requests + 1)]


def test_of_many_open_requests_those_that_run_and_the_newest_are_told() -> None:
    engine = Engine(max_num_seqs=4)
    for handle in range(1, 2 * MAX_OPEN):
        engine.add(make_request(handle, [1], 9))
    engine.step()
    told = [way.handle for way in recent(engine).requests]
    newest = [*range(MAX_OPEN + 4, 2 * MAX_OPEN)]
    assert told == [*newest, 1, 2, 3, 4]


@pytest.mark.parametrize("seed", range(6))
def test_steps_and_ways_are_those_of_the_step_trace(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    engine, path = _random_engine(rng), tmp_path / "trace"
    trace = StepTrace(str(path))
    trace.attach(engine.scheduler)
    _run_at_random(engine, trace, rng)
    trace.close()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    told = recent(engine)
    columns = told.steps
    assert len(lines) > 30
    assert columns.number == [line["step"] for line in lines]
    computed = np.add(columns.num_prefill_tokens, columns.num_decode_tokens)
    assert computed.tolist() == [sum(line["scheduled"].values()) for line in lines]
    assert columns.num_running == [line["num_running"] for line in lines]
    assert columns.num_waiting == [line["num_waiting"] for line in lines]
    used = [line["total_blocks"] - line["free_blocks"] for line in lines]
    assert columns.num_used_blocks == used
    assert columns.num_preempted == [len(line["preempted"]) for line in lines]
    assert sum(columns.num_preempted) == sum(
        phase == "preempted" for way in told.requests for phase, _ in way.way
    )
    for way in told.requests:
        phases = [phase for phase, _ in way.way]
        assert (phases[0], phases[-1]) == ("queued", "ended")
        assert all(phase in FOLLOWS[before] for before, phase in pairwise(phases))
        times = [since_s for _, since_s in way.way]
        assert times == sorted(times)
        assert times[-1] <= told.now_s


def _random_engine(rng: random.Random) -> Engine:
    kinds: list[dict[str, Any]] = [{}, {"num_speculative_tokens": 3}, {"policy": "priority"}]
    return Engine(
        num_blocks=rng.choice([16, 20]),
        max_model_len=48,
        max_num_seqs=rng.choice([2, 5]),
        max_num_batched_tokens=rng.choice([20, 40]),
        long_prefill_token_threshold=rng.choice([0, 5]),
        **rng.choice(kinds),
    )


def _run_at_random(engine: Engine, trace: StepTrace, rng: random.Random) -> None:
    """Forty requests that come, are aborted or end; steps take as long as they like."""
    scheduler, waiting = engine.scheduler, [*range(1, 41)]
    while waiting or scheduler.num_requests:
        while waiting and rng.random() < 0.4:
            prompt = [rng.randrange(3) for _ in range(rng.randint(1, 20))]
            request = make_request(waiting.pop(0), prompt, rng.randint(1, 20), max_model_len=48)
            engine.add(request)
        if rng.random() < 0.1 and (some := list(scheduler._requests.values())):
            end(engine, rng.choice(some))
        group = scheduler.next_group()
        if group is None:
            continue
        plan = scheduler.schedule(group)
        trace.begin()
        result = engine.executor.execute(plan)
        engine.now_s += rng.random()
        scheduler.update(result)
        scheduler.log.append(StepDone(0.0))
        if rng.random() < 0.2:
            engine.collector.fold()
