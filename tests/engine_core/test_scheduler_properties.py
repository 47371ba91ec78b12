"""Random workloads against the scheduler's invariants, checked after every step.

The fake worker recomputes every context from its simulated KV memory, so these tests also show that
chunking, preemption, prefix hits and aborts never change a token.
"""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from nanocore.engine_core.scheduling.scheduler import Scheduler
from tests.engine_core.scheduler_checks import check_blocks, check_idle, check_plan, check_rows
from tests.fakes import (
    Deliveries,
    PipelinedExecutor,
    expected_tokens,
    make_request,
    make_scheduler,
    withhold_some,
)

BLOCK_SIZE = 4
MAX_MODEL_LEN = 48


@st.composite
def workloads(draw: st.DrawFn) -> dict:
    """Engine limits, and requests (prompt, max_tokens, arrival step, abort step or None, salt)."""
    needed = -(-MAX_MODEL_LEN // BLOCK_SIZE)
    max_num_seqs = draw(st.integers(1, 6))
    stems = draw(
        st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=24), min_size=1, max_size=3)
    )
    requests = []
    for _ in range(draw(st.integers(1, 10))):
        prompt = draw(st.sampled_from(stems)) + draw(st.lists(st.integers(0, 3), max_size=8))
        requests.append(
            (
                prompt,
                draw(st.integers(1, MAX_MODEL_LEN - len(prompt))),
                draw(st.integers(0, 12)),
                draw(st.none() | st.integers(0, 40)),
                draw(st.sampled_from([None, None, "a"])),
            )
        )
    return {
        "limits": {
            "num_blocks": draw(st.integers(needed, 3 * needed)),
            "block_size": BLOCK_SIZE,
            "max_num_seqs": max_num_seqs,
            "max_num_batched_tokens": draw(st.integers(max_num_seqs, 40)),
            "max_model_len": MAX_MODEL_LEN,
            "long_prefill_token_threshold": draw(st.sampled_from([0, 0, 1, 5])),
            "policy": draw(st.sampled_from(["fcfs", "priority"])),
            "max_num_partial_prefills": draw(st.sampled_from([0, 0, 1])),
            "enable_prefix_caching": draw(st.booleans()),
        },
        "requests": requests,
    }


def run(
    workload: dict, depth: int, withholds: bool = False, **limits: Any
) -> tuple[Scheduler, PipelinedExecutor]:
    """Run a workload to its end, with up to `depth` steps in flight, and check all it delivers."""
    scheduler, executor = make_scheduler(**workload["limits"] | limits)
    if withholds:
        executor.withhold = withhold_some
    worker = PipelinedExecutor(executor)
    deliveries = Deliveries()
    pending = dict(enumerate(workload["requests"], 1))
    aborted: set[int] = set()
    for step in range(5000):
        for handle, (prompt, max_tokens, arrival, _, salt) in list(pending.items()):
            if arrival <= step:
                del pending[handle]
                scheduler.add(
                    make_request(
                        handle,
                        prompt,
                        max_tokens,
                        block_size=BLOCK_SIZE,
                        cache_salt=salt,
                        max_model_len=MAX_MODEL_LEN,
                    )
                )
        if not pending and scheduler.num_requests == 0:
            break
        if scheduler.running.may_overlap or scheduler.next_group() is not None:
            plan = scheduler.schedule(scheduler.next_group() or 0)
            check_plan(scheduler, plan)
            worker.submit(plan)
        for handle, (*_, abort, _salt) in enumerate(workload["requests"], 1):
            # Between execution and update: the abort must win over the step's own result.
            if abort == step and handle not in pending and scheduler.abort(handle):
                aborted.add(handle)
        if len(worker) == depth or (len(worker) and scheduler.next_group() is None):
            deliveries.take(scheduler, worker.collect())
            check_rows(scheduler)
            check_blocks(scheduler)
    else:
        raise AssertionError("the workload does not end")
    while len(worker):
        deliveries.take(scheduler, worker.collect())

    for handle, (prompt, max_tokens, *_) in enumerate(workload["requests"], 1):
        expected = expected_tokens(prompt, max_tokens)
        got = deliveries.tokens.get(handle, [])
        if handle in aborted:
            assert got == expected[: len(got)]
            assert handle not in deliveries.finish_reasons
        else:
            assert got == expected
            assert deliveries.finish_reasons[handle] == "length"
    check_idle(scheduler)
    return scheduler, worker


@settings(max_examples=200, deadline=None)
@given(workloads(), st.sampled_from([1, 2, 3]))
def test_every_request_gets_its_tokens_once_and_in_order(workload: dict, depth: int) -> None:
    run(workload, depth)


@settings(max_examples=200, deadline=None)
@given(workloads(), st.sampled_from([2, 3]))
def test_pipeline_stages_get_every_token_in_time(workload: dict, num_stages: int) -> None:
    run(workload, depth=num_stages, num_groups=num_stages)


@settings(max_examples=100, deadline=None)
@given(workloads(), st.sampled_from([1, 1, 2, 3]), st.integers(1, 4), st.booleans())
def test_drafts_change_no_token_whatever_is_accepted_of_them(
    workload: dict, num_stages: int, num_drafts: int, withholds: bool
) -> None:
    limits = workload["limits"]
    run(
        workload,
        depth=num_stages,
        num_groups=num_stages,
        withholds=withholds,
        num_speculative_tokens=num_drafts,
        max_num_batched_tokens=limits["max_num_batched_tokens"] * (1 + num_drafts),
    )


@settings(max_examples=60, deadline=None)
@given(workloads(), st.sampled_from([1, 2, 3]))
def test_without_preemption_or_hits_no_token_is_computed_twice(workload: dict, depth: int) -> None:
    requests = [(prompt, max_tokens, arrival, None, salt)
                for prompt, max_tokens, arrival, _, salt in workload["requests"]]  # fmt: skip
    quiet = {"limits": workload["limits"], "requests": requests}
    _, worker = run(quiet, depth, num_blocks=200, enable_prefix_caching=False)
    # The last token of a request is delivered and never computed.
    assert worker.num_tokens == sum(len(prompt) + n - 1 for prompt, n, *_ in requests)
