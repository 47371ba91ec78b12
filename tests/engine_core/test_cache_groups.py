"""Cache groups as an engine has them: what is lost, what is shown, and that requests get on."""

from __future__ import annotations

import random
from pathlib import Path

import msgspec
import pytest

from nanocore.engine_core.log.event_log import StepDone
from nanocore.engine_core.log.metrics import EngineMetrics, IoCounts, stats_of
from nanocore.engine_core.log.trace import StepTrace
from nanocore.kv_cache import CacheGroup, Capacity
from nanocore.protocol.metrics import CacheGroupStats
from nanocore.tracing.explanation import explain
from nanocore.tracing.texts import explanation_text
from tests.campaign import examples
from tests.engine_core.scheduler_checks import Engine, check_idle, check_plan
from tests.fakes import (
    Deliveries,
    FakeExecutor,
    PipelinedExecutor,
    TalliedScheduler,
    expected_tokens,
    make_request,
    make_scheduler,
)

GROUPS = [CacheGroup("full", 0, 3), CacheGroup("window(5)", 5)]


def lose_a_window() -> tuple[TalliedScheduler, FakeExecutor]:
    """The full layers still have a prompt of ten blocks, the others have let go of the middle.

    Another prompt has taken the blocks that left the window first.
    """
    scheduler, executor = make_scheduler(
        num_blocks=12, cache_groups=GROUPS, max_num_batched_tokens=8
    )
    deliveries = Deliveries()
    for handle, prompt in ((1, [1] * 40), (2, [2] * 20)):
        scheduler.add(make_request(handle, prompt, 1))
        while scheduler.num_requests:
            deliveries.step(scheduler, executor)
    return scheduler, executor


def test_tokens_that_a_window_has_let_go_of_are_computed_again_and_counted_as_lost() -> None:
    scheduler, executor = lose_a_window()
    deliveries = Deliveries()
    scheduler.add(make_request(3, [1] * 21 + [3] * 8, 2))
    deliveries.step(scheduler, executor)
    assert scheduler.kv_cache.stats.lost_tokens == {"window(5)": 20}
    assert scheduler.completed.plan.lost == {"r3": (20, "window(5)")}
    stats = stats_of(scheduler, False)
    assert [one.prefix_cache_lost_tokens for one in stats.groups] == [0, 20]
    # The place has become a checkpoint: the next one finds it.
    while scheduler.num_requests:
        deliveries.step(scheduler, executor)
    scheduler.add(make_request(4, [1] * 21 + [4] * 8, 2))
    while scheduler.num_requests:
        deliveries.step(scheduler, executor)
    assert (deliveries.num_cached[3], deliveries.num_cached[4]) == (0, 20)


def test_statistics_and_metrics_name_each_group_and_have_the_sums() -> None:
    engine = Engine(num_blocks=10, cache_groups=GROUPS, max_num_batched_tokens=64)
    engine.add(1, [1] * 24, 2)
    engine.step()
    stats = stats_of(engine.scheduler, False)
    # A slab has three blocks of the first group, or one of the other: two and six are held.
    assert stats.groups == [
        CacheGroupStats(name="full", num_blocks=30, num_free_blocks=2 * 3),
        CacheGroupStats(name="window(5)", num_blocks=10, num_free_blocks=2),
    ]
    assert (stats.num_blocks, stats.num_free_blocks) == (40, 8)
    assert stats.kv_cache_usage_perc == pytest.approx(0.8)
    found = EngineMetrics(engine.scheduler, {}, {}).collect(IoCounts())
    (lost,) = [one for one in found if one.name == "prefix_cache_lost_tokens"]
    assert [(one.labels, one.value) for one in lost.samples] == [
        ([("group", "full")], 0), ([("group", "window(5)")], 0),
    ]  # fmt: skip
    engine.finish()


def test_a_model_with_one_group_shows_none() -> None:
    engine = Engine()
    assert stats_of(engine.scheduler, False).groups == []
    names = {one.name for one in EngineMetrics(engine.scheduler, {}, {}).collect(IoCounts())}
    assert "prefix_cache_lost_tokens" not in names


def test_a_trace_names_the_groups_and_its_explanation_what_was_lost(tmp_path: Path) -> None:
    scheduler, executor = lose_a_window()
    trace = StepTrace(str(tmp_path / "trace"))
    trace.attach(scheduler)
    scheduler.add(make_request(3, [1] * 21 + [3] * 8, 2))
    while scheduler.num_requests:
        plan = scheduler.schedule()
        trace.begin()
        scheduler.update(executor.execute(plan))
        scheduler.log.append(StepDone(0.0))
    trace.close()
    first, *_ = map(msgspec.json.decode, (tmp_path / "trace").read_bytes().splitlines())
    assert first["lost"] == {"r3": {"tokens": 20, "group": "window(5)"}}
    assert [one["name"] for one in first["groups"]] == ["full", "window(5)"]
    assert first["free_blocks"] == sum(one["free_blocks"] for one in first["groups"])
    explained = explain(str(tmp_path / "trace"), "r3")
    text = explanation_text(explained)
    assert "no hit; window(5) had let go of what 20 more need" in text


@pytest.mark.parametrize("depth", [1, 3])
def test_a_request_whose_blocks_lie_in_too_many_slabs_gets_on_alone(depth: int) -> None:
    """Memory is just enough for the longest request, if its blocks fill their slabs."""
    num_alone = 0
    for seed in {*range(examples(70)), 75}:  # 75 is one that needs it, at any depth
        draw = random.Random(seed)
        window, per_slab = draw.choice([5, 9, 13, 17]), draw.choice([3, 4, 5, 6])
        groups = [CacheGroup("full", 0, draw.choice([1, 2])), CacheGroup("w", window, per_slab)]
        chunk, most = draw.choice([4, 8, 12]), draw.choice([40, 60])
        scheduler, executor = make_scheduler(
            num_blocks=Capacity(1, 4, groups, chunk).slabs_of(most), cache_groups=groups,
            max_model_len=most, long_prefill_token_threshold=chunk,
            enable_prefix_caching=draw.random() < 0.5,
        )  # fmt: skip
        worker, deliveries, wishes = PipelinedExecutor(executor), Deliveries(), {}
        for handle in range(1, draw.randint(3, 6)):
            length = draw.randint(1, 20 if handle > 1 else 8)
            wishes[handle] = length, draw.randint(1, most - length) if handle > 1 else most - length
            scheduler.add(
                make_request(handle, [handle] * length, wishes[handle][1], max_model_len=most)
            )
        while scheduler.num_requests:
            while len(worker) < depth and (group := scheduler.next_group()) is not None:
                plan = scheduler.schedule(group)
                check_plan(scheduler, plan)
                assert not scheduler.is_stuck
                worker.submit(plan)
            deliveries.take(scheduler, worker.collect())
            num_alone += scheduler.kv_cache.is_compact
            assert scheduler.counters.num_steps < 3000, f"seed {seed} does not end"
        while len(worker):
            deliveries.take(scheduler, worker.collect())
        for handle, (length, max_tokens) in wishes.items():
            assert deliveries.tokens[handle] == expected_tokens([handle] * length, max_tokens)
        check_idle(scheduler)
        assert not scheduler.kv_cache.is_compact
    assert num_alone, "no workload needs it"


def test_a_request_whose_cached_prefix_lies_in_too_many_slabs_gets_on_without_it() -> None:
    groups, most = [CacheGroup("full"), CacheGroup("window(9)", 9, 5)], 40
    scheduler, executor = make_scheduler(
        num_blocks=Capacity(1, 4, groups, 8).slabs_of(most), cache_groups=groups,
        max_model_len=most, long_prefill_token_threshold=8,
    )  # fmt: skip
    first, second = [1] * 23, [1] * 36 + [2] * 3
    scheduler.add(make_request(1, first, 5, max_model_len=most))
    scheduler.add(make_request(2, second, 1, max_model_len=most))
    deliveries, num_alone = Deliveries(), 0
    while scheduler.num_requests:
        plan = scheduler.schedule()
        assert not scheduler.is_stuck
        num_alone += scheduler.kv_cache.is_compact
        deliveries.take(scheduler, executor.execute(plan))
    assert num_alone, "the prefix fits"
    assert deliveries.tokens[1] == expected_tokens(first, 5)
    assert deliveries.tokens[2] == expected_tokens(second, 1)
    check_idle(scheduler)
