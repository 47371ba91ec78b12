"""What steps use of the machine, added up: against a count of token after token."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from nanocore.engine_core.log.event_log import Entries, StepDone, StepEntry
from nanocore.engine_core.log.utilisation import Utilisation
from nanocore.engine_core.mailbox import AddRequest
from nanocore.engine_core.scheduling.step_plan import Chunk, StepPlan
from nanocore.engine_core.step_clock import StepClock
from nanocore.worker.cost.model_cost import AttentionCost, MachineSpeed, ModelCost
from nanocore.worker.plan import ModelRunnerOutput, SchedulerOutput
from tests.engine_core.core_under_test import CoreUnderTest
from tests.fakes import make_request

COST = ModelCost(
    num_params=10_000,
    token_params=1000,
    head_params=200,
    expert_params=8000,
    num_experts=8,
    num_experts_per_tok=2,
    weight_bytes=2400,
    expert_bytes=16_000,
    attention=[
        AttentionCost(window=0, kv_bytes=40, pair_flops=100),
        AttentionCost(window=6, kv_bytes=10, pair_flops=20),
    ],
)
SPEED = MachineSpeed(bytes_per_s=1e6, flops_per_s=1e7)


class Worker(CoreUnderTest):
    """A fake worker of several steps in flight, and a clock that each step moves on."""

    def __init__(self, **limits: int) -> None:
        super().__init__(**limits)
        self.now_s = 100.0
        self.plans: list[StepPlan] = []

    def submit(self, plan: SchedulerOutput) -> None:
        self.plans.append(self.scheduler.planned)
        super().submit(plan)

    def collect(self) -> ModelRunnerOutput:
        self.now_s += 0.25
        return super().collect()

    def use(self, used: Utilisation, seed: int, num_steps: int = 10**6) -> None:
        """Requests of random lengths that come and go, to their end.

        num_steps: entries are taken after so many steps, as another thread does at any time.
        """
        rng, core, num_requests = random.Random(seed), self.core, 30
        core.clock = Clock(self)
        waiting = list(range(num_requests))
        while waiting or self.scheduler.num_requests:
            while waiting and rng.random() < 0.3:
                prompt = [rng.randrange(9) for _ in range(rng.randrange(1, 40))]
                request = make_request(waiting.pop(), prompt, rng.randrange(1, 30))
                self.inbox.put(AddRequest(request))
            core.drain_inbox(wait=False)
            if not core.is_idle:
                core.step()
            if len(self.plans) % num_steps == 0:
                used.take(self.scheduler.log.take())
            self.now_s += 0.5  # between steps
        used.take(self.scheduler.log.take())


class Clock(StepClock):
    """The worker's."""

    def __init__(self, worker: Worker) -> None:
        super().__init__()
        self._worker = worker

    def begin(self) -> None:
        self.began_s = self._worker.now_s

    @property
    def age_s(self) -> float:
        assert self.began_s is not None, "asked in steps"
        return self._worker.now_s - self.began_s


def entries(busy_s: float, decode_ends: list[int], chunks: Sequence[Chunk] = ()) -> Entries:
    """What a step logs that computes a token in each row, and chunks."""
    ends, num_prefilled = np.array(decode_ends, np.int64), sum(one.num_tokens for one in chunks)
    step = StepEntry(
        number=1, ended_s=1.0, duration_s=1.0, num_decode_tokens=len(ends),
        num_prefill_tokens=num_prefilled, num_running=0, num_waiting=0, num_free_blocks=0,
        num_preempted=0, num_completed=0, decode_ends=ends, decode_counts=None, chunks=chunks,
        intervals=None,
    )  # fmt: skip
    return Entries([step], [StepDone(busy_s)], [])


def tokens_of(plan: StepPlan) -> Iterator[tuple[int, int]]:
    """(row, position) of each token that the step computes."""
    for row, num_tokens, num_computed in plan.scheduled():
        yield from ((row, num_computed + i) for i in range(num_tokens))


def reference(plans: list[StepPlan], is_prefill: bool) -> tuple[int, int, float, float]:
    """(steps, tokens, bytes, flops), by definition."""
    num_steps = num_tokens = 0
    num_bytes = flops = 0.0
    for plan in plans:
        tokens = list(tokens_of(plan))
        if not tokens or bool(plan.chunks) != is_prefill:
            continue
        num_steps += 1
        num_tokens += len(tokens)
        num_bytes += 2400 + 16_000 * (1 - 0.75 ** len(tokens))
        num_drafted = sum(chunk.num_tokens for chunk in plan.scheduled()) - sum(
            chunk.num_tokens for chunk in plan.chunks
        )
        flops += len(tokens) * 2 * (1000 + 2000) + (num_drafted + len(plan.completed)) * 400
        for kind in COST.attention:
            seen: dict[int, set[int]] = {}
            for row, position in tokens:
                first = max(0, position - kind.window + 1) if kind.window else 0
                flops += (position + 1 - first) * kind.pair_flops
                seen.setdefault(row, set()).update(range(first, position + 1))
            num_bytes += sum(map(len, seen.values())) * kind.kv_bytes
    return num_steps, num_tokens, num_bytes, flops


@pytest.mark.parametrize("limits", [{}, {"num_groups": 3}, {"num_speculative_tokens": 2}])
@pytest.mark.parametrize("num_steps", [1, 7, 10**6])
def test_totals_are_those_of_every_token(limits: dict[str, int], num_steps: int) -> None:
    worker = Worker(**limits)
    used = Utilisation(COST, SPEED)
    worker.use(used, num_steps, num_steps)
    totals = used.totals()
    for kind, is_prefill in (("decode", False), ("prefill", True)):
        found = [totals[kind][f"step{name}"] for name in ("s", "_tokens", "_read_bytes", "_flops")]
        expected = reference(worker.plans, is_prefill)
        assert expected[0] > 10
        assert found == pytest.approx(expected)
    assert used.totals() == totals


def test_a_step_lasts_while_the_loop_is_busy_with_it() -> None:
    worker = Worker()
    used = Utilisation(COST, SPEED)
    worker.use(used, seed=1)
    totals = used.totals()
    for numbers in totals.values():
        assert numbers["step_seconds"] == 0.25 * numbers["steps"]  # pauses are not counted


def test_shares_are_of_what_the_machine_gives() -> None:
    worker = Worker()
    used = Utilisation(COST, SPEED)
    assert used.totals()["decode"]["mbu"] == used.totals()["prefill"]["mfu"] == 0
    worker.use(used, seed=1)
    for numbers in used.totals().values():
        seconds = numbers["step_seconds"]
        assert numbers["mbu"] == pytest.approx(numbers["step_read_bytes"] / seconds / 1e6)
        assert numbers["mfu"] == pytest.approx(numbers["step_flops"] / seconds / 1e7)
        assert numbers["machine_bytes_per_second"] == pytest.approx(1e6)
        assert numbers["machine_flops_per_second"] == 1e7


def test_no_share_is_above_one_where_the_machine_was_measured_too_slow() -> None:
    used = Utilisation(COST, MachineSpeed(bytes_per_s=1, flops_per_s=1))
    Worker().use(used, seed=1)
    for numbers in used.totals().values():
        assert numbers["mbu"] == numbers["mfu"] == 1
        had = numbers["step_flops"] / numbers["step_seconds"]
        assert numbers["machine_flops_per_second"] == had
    assert all("100.0% of the FLOP/s (MFU)" in line for line in used.summary())


def test_before_the_machines_speed_is_known_there_are_counts_and_no_shares() -> None:
    used = Utilisation(COST, None)
    Worker().use(used, seed=1)
    counts = used.totals()["decode"]
    assert counts["steps"] > 10
    assert not [name for name in counts if name.endswith(("mbu", "mfu", "_per_second"))]
    assert all("the machine's speed was not measured" in line for line in used.summary())
    used.speed = SPEED
    assert counts.items() < used.totals()["decode"].items()
    assert used.totals()["decode"]["mbu"] > 0


def test_the_log_has_a_line_for_each_kind_of_steps() -> None:
    used = Utilisation(COST, SPEED)
    assert list(used.summary()) == []
    used.take(entries(0.5, [3, 4]))
    num_bytes = 2400 + 16_000 * (1 - 0.75**2) + 7 * 50
    flops = 2 * (2 * 3000 + 400) + 7 * 120
    assert list(used.summary()) == [
        f"decode: 1 step, 2 tokens, 0.50 s; {num_bytes / 5e5:.1%} of the memory's bandwidth (MBU),"
        f" {flops / 5e6:.1%} of the FLOP/s (MFU)"
    ]


def test_a_step_without_tokens_is_none() -> None:
    used = Utilisation(COST, SPEED)
    used.take(entries(0.1, []))
    assert [numbers["steps"] for numbers in used.totals().values()] == [0, 0]


def test_a_step_counts_when_the_step_loop_is_done_with_it() -> None:
    used = Utilisation(COST, SPEED)
    first, second = entries(0.5, [3]), entries(0.25, [4])
    used.take(Entries(first.steps, [], []))
    assert used.totals()["decode"]["steps"] == 0
    used.take(Entries(second.steps, first.done, []))
    assert [used.totals()["decode"][name] for name in ("steps", "step_seconds")] == [1, 0.5]
    used.take(Entries([], second.done, []))
    assert [used.totals()["decode"][name] for name in ("steps", "step_seconds")] == [2, 0.75]
