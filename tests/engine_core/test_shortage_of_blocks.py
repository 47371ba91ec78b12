"""Requests that together want more KV blocks than there are, with steps in flight.

Random workloads that are short of blocks in every way: a row waits for blocks that steps in flight
are about to release, somebody is preempted, or both in one step. What they reach is measured: a
defect that ended engines hid for long where no random workload came.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import coverage
import pytest

from nanocore.engine_core.scheduling import preemption, running_set
from nanocore.engine_core.scheduling.scheduler import Scheduler
from nanocore.engine_core.scheduling.step_plan import StepPlan
from nanocore.kv_cache import FULL, CacheGroup, Capacity
from tests.campaign import examples
from tests.engine_core.scheduler_checks import check_idle, check_plan
from tests.fakes import (
    Deliveries,
    PipelinedExecutor,
    expected_tokens,
    make_request,
    make_scheduler,
)

BLOCK_SIZE = 4
WINDOWS = [CacheGroup("full", 0, 3), CacheGroup("window(5)", 5, 2)]
KINDS: dict[str, tuple[int, dict[str, Any]]] = {
    "one group": (60, {"depth": 2}),
    "two stages": (150, {"depth": 2, "num_groups": 2}),
    "three stages": (30, {"depth": 3, "num_groups": 3}),
    "drafts": (30, {"depth": 1, "num_speculative_tokens": 2}),
    "priorities": (120, {"depth": 2, "policy": "priority"}),
    "windows": (60, {"depth": 2, "cache_groups": WINDOWS}),
    "windows, two stages": (60, {"depth": 2, "num_groups": 2, "cache_groups": WINDOWS}),
}
"""Engines: the number of workloads that each runs, and its limits."""

RARE = {"one group": [35], "two stages": [97], "priorities": [62], "windows": [27]}
"""Seeds of workloads that reach what most do not, so that a few others are enough beside them."""

MEASURED = (
    *(f"RunningSet.{name}" for name in ("compute", "_share_budget", "provide", "_idle_rows")),
    "RunningSet._decodes",
    "Preempter.make_room",
)
"""Methods that share out tokens and blocks."""

Situations = Counter[str]
Workload = tuple[dict[str, Any], list[tuple[int, int, int, int]], dict[int, int]]
"""(limits; requests of prompt tokens, max_tokens, step of arrival, priority; who is aborted before
which step is planned)."""


def run(workload: Workload, depth: int, kind: str = "") -> Situations:
    """Run requests to their ends with up to `depth` steps in flight, and check all of it."""
    limits, requests, aborts = workload
    scheduler, executor = make_scheduler(block_size=BLOCK_SIZE, **limits)
    worker, deliveries = PipelinedExecutor(executor), Deliveries()
    pending, num_planned = dict(enumerate(requests, 1)), 0
    situations = Situations()
    while pending or scheduler.num_requests:
        while len(worker) < depth:
            for handle, (num_prompt, max_tokens, arrival, priority) in list(pending.items()):
                if arrival <= num_planned or not scheduler.num_requests:
                    del pending[handle]
                    prompt, most = [handle] * num_prompt, limits["max_model_len"]
                    scheduler.add(make_request(
                        handle, prompt, max_tokens, max_model_len=most, priority=priority
                    ))  # fmt: skip
            if (group := scheduler.next_group()) is None:
                break
            num_planned += 1
            scheduler.abort(aborts.get(num_planned, 0))
            with observed(scheduler, kind, situations):
                plan = scheduler.schedule(group)
            check_plan(scheduler, plan)
            assert not scheduler.is_stuck
            assert scheduler.planned.stalled <= {one.row for one in list(scheduler.running)}
            worker.submit(plan)
        assert len(worker) or not scheduler.num_requests, "requests wait, and no step can begin"
        if len(worker):
            deliveries.take(scheduler, worker.collect())
    while len(worker):
        deliveries.take(scheduler, worker.collect())
    for handle, (num_prompt, max_tokens, *_) in enumerate(requests, 1):
        if handle not in aborts.values():
            assert deliveries.tokens[handle] == expected_tokens([handle] * num_prompt, max_tokens)
    check_idle(scheduler)
    return situations


@contextmanager
def observed(scheduler: Scheduler, kind: str, situations: Situations) -> Iterator[None]:
    """Count what happens while a step is planned."""
    running, ours = scheduler.running, scheduler.preemption
    make_room = ours.make_room

    def note(plan: StepPlan, row: int, num_tokens: int) -> None:
        waiting = [running.request(waiting) for waiting in plan.stalled]
        num_preempted = len(plan.preempted)
        make_room(plan, row, num_tokens)
        if len(plan.preempted) == num_preempted:
            situations[f"{kind}: waits"] += 1
        elif plan.preempted[-1] in waiting:
            situations[f"{kind}: who waits is preempted"] += 1
        else:
            situations[f"{kind}: preempted"] += 1

    ours.make_room = note  # type: ignore[method-assign]
    yield
    ours.make_room = make_room  # type: ignore[method-assign]


def random_workload(seed: int, **limits: Any) -> Workload:
    """Return a few short requests and long ones, whose chunks want more blocks than are free.

    Most prompts are computed in chunks of more than two blocks, most requests come at once, and
    blocks for about two of the long ones are there.
    """
    draw = random.Random(seed)
    num_blocks = draw.randint(7, 9)
    groups = limits.get("cache_groups", FULL)
    most = Capacity(num_blocks, BLOCK_SIZE, groups, max_step_tokens=64).most_tokens
    requests = []
    for _ in range(draw.randint(6, 10)):
        is_short = draw.random() < 0.7
        num_prompt = draw.choice([1, 2, 3, 4, 4, 4]) if is_short else draw.randint(9, most - 8)
        max_tokens = min(draw.choice([1, 1, 4, 5, 6]), most - num_prompt)
        arrival = draw.choice([0] * 9 + [3])
        requests.append((num_prompt, max_tokens, arrival, draw.randint(0, 1)))
    limits = {
        "num_blocks": num_blocks,
        "max_model_len": most,
        "enable_prefix_caching": draw.random() < 0.1,
        "long_prefill_token_threshold": draw.choice([0, 8, 9, 9, 9, 10]),
        "max_num_batched_tokens": draw.choice([24, 64, 64, 64, 64]),
        **limits,
    }
    aborts = {draw.randint(2, 6): 1} if draw.random() < 0.2 else {}
    return limits, requests, aborts


@pytest.mark.parametrize("num_groups", [1, 2])
def test_a_row_that_waits_for_blocks_and_is_preempted_waits_no_more(num_groups: int) -> None:
    limits = {"num_blocks": 8, "max_model_len": 32, "long_prefill_token_threshold": 9,
              "enable_prefix_caching": False, "num_groups": num_groups}  # fmt: skip
    requests = [(4, 4, 0, 0), (1, 1, 0, 0), (18, 1, 0, 0), (9, 5, 0, 0)]
    assert run((limits, requests, {}), depth=2)[": who waits is preempted"]


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_who_did_not_fit_is_admitted_when_more_of_its_prefix_is_computed(policy: str) -> None:
    # 2 wants 8 blocks. When 1 holds two and has filled one, 6 are free, and 7 would be taken. When
    # 1 has filled its second, nothing was freed, but 6 will do.
    scheduler, executor = make_scheduler(
        num_blocks=8, block_size=BLOCK_SIZE, long_prefill_token_threshold=3, policy=policy
    )
    deliveries = Deliveries()
    scheduler.add(make_request(1, [1] * 8, 3))
    deliveries.step(scheduler, executor)
    scheduler.add(make_request(2, [1] * 8 + [2] * 23, 1))
    plans = []
    while scheduler.num_requests:
        deliveries.step(scheduler, executor)
        plans.append([one.handle for one in scheduler.completed.plan.new])
    assert plans[:2] == [[], [2]]
    check_idle(scheduler)


def test_who_wants_more_blocks_than_there_are_is_served_in_every_way(tmp_path: Path) -> None:
    measured = coverage.Coverage(
        data_file=None,
        branch=True,
        include=[running_set.__file__, preemption.__file__],
        config_file=False,
    )
    situations = Situations()
    with measured.collect():
        for kind, (num_seeds, limits) in KINDS.items():
            depth, limits = limits["depth"], {k: v for k, v in limits.items() if k != "depth"}
            for seed in {*range(examples(num_seeds)), *RARE.get(kind, ())}:
                situations += run(random_workload(seed, **limits), depth, kind)
    measured.json_report(outfile=str(tmp_path / "coverage.json"))
    functions: dict[str, Any] = {}
    for report in json.loads((tmp_path / "coverage.json").read_text())["files"].values():
        functions |= report["functions"]
    for name in MEASURED:
        found = functions[name]
        assert found["executed_lines"], name
        assert not found["missing_lines"] + found["missing_branches"], f"{name} is not reached"
    for kind in ("one group", "two stages", "priorities", "windows"):
        for situation in ("waits", "preempted", "who waits is preempted"):
            assert situations[f"{kind}: {situation}"], situations
