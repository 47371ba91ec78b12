"""Random workloads against the scheduler's invariants, checked after every step.

The fake worker recomputes every context from its simulated KV memory, so these tests also show that
chunking, preemption, prefix hits and aborts never change a token.
"""

from __future__ import annotations

from typing import Any

from hypothesis import example, given, settings
from hypothesis import strategies as st

from nanocore.engine_core.scheduling.scheduler import Scheduler
from nanocore.kv_cache import FULL, CacheGroup, Capacity
from tests.campaign import examples
from tests.engine_core.scheduler_checks import check_blocks, check_idle, check_plan, check_rows
from tests.fakes import (
    Deliveries,
    FakeProposer,
    PipelinedExecutor,
    expected_logprobs,
    expected_tokens,
    make_request,
    make_scheduler,
    withhold_some,
)

BLOCK_SIZE = 4
MAX_MODEL_LEN = 48
GROUPS = (
    [CacheGroup("full", 0, 2), CacheGroup("window(7)", 7)],
    [CacheGroup("full"), CacheGroup("window(2)", 2, 3), CacheGroup("window(17)", 17)],
    [CacheGroup("window(8)", 8)],
)
SPACING = 10  # of handles: a request's samples have the next ones


@st.composite
def workloads(draw: st.DrawFn) -> dict:
    """Engine limits, and requests.

    (prompt, max_tokens, arrival step, abort step or None, salt, samples, prompt_logprobs); an abort
    is of the first sample, or at steps that 3 does not divide of all.
    """
    groups = draw(st.just(FULL) | st.sampled_from(GROUPS))
    max_num_seqs = draw(st.integers(1, 6))
    max_num_batched_tokens = draw(st.integers(max_num_seqs, 40))
    memory = Capacity(1, BLOCK_SIZE, groups, max_num_batched_tokens)
    needed = memory.slabs_of(MAX_MODEL_LEN)
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
                draw(st.sampled_from([1, 1, 1, 2, 4])),
                draw(st.sampled_from([None, None, 0, 1])),
            )
        )
    return {
        "limits": {
            "num_blocks": draw(st.integers(needed, 3 * needed)),
            "block_size": BLOCK_SIZE,
            "max_num_seqs": max_num_seqs,
            "max_num_batched_tokens": max_num_batched_tokens,
            "max_model_len": MAX_MODEL_LEN,
            "cache_groups": groups,
            "long_prefill_token_threshold": draw(st.sampled_from([0, 0, 1, 5, 8, 9])),
            "policy": draw(st.sampled_from(["fcfs", "priority"])),
            "enable_prefix_caching": draw(st.booleans()),
        },
        "requests": requests,
    }


def run(
    workload: dict, depth: int, withholds: bool = False, num_levels: int = 3, **limits: Any
) -> tuple[Scheduler, PipelinedExecutor]:
    """Run a workload to its end, with up to `depth` steps in flight, and check all it delivers.

    num_levels: of priority, which only that policy looks at.
    """
    scheduler, executor = make_scheduler(**workload["limits"] | limits)
    if withholds:
        executor.withhold = withhold_some
    worker = PipelinedExecutor(executor)
    deliveries = Deliveries()
    requests = {SPACING * i: request for i, request in enumerate(workload["requests"], 1)}
    pending = dict(requests)
    aborted: set[int] = set()
    for step in range(5000):
        for handle, (prompt, max_tokens, arrival, _, salt, n, num) in list(pending.items()):
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
                        n=n,
                        logprobs=num,
                        prompt_logprobs=num,
                        priority=handle // SPACING % num_levels,
                    )
                )
        if not pending and scheduler.num_requests == 0:
            break
        if scheduler.running.may_overlap or scheduler.next_group() is not None:
            plan = scheduler.schedule(scheduler.next_group() or 0)
            check_plan(scheduler, plan)
            worker.submit(plan)
        for handle, (_, _, _, abort, _, n, _) in requests.items():
            # Between execution and update: the abort must win over the step's own result.
            if abort == step and handle not in pending:
                samples = range(handle, handle + (n if step % 3 else 1))
                aborted.update(sample for sample in samples if scheduler.abort(sample))
        if len(worker) == depth or (len(worker) and scheduler.next_group() is None):
            deliveries.take(scheduler, worker.collect())
            check_rows(scheduler)
            check_blocks(scheduler)
    else:
        raise AssertionError("the workload does not end")
    while len(worker):
        deliveries.take(scheduler, worker.collect())

    for first, (prompt, max_tokens, _, _, _, n, num) in requests.items():
        expected = expected_tokens(prompt, max_tokens)
        for handle in range(first, first + n):
            got = deliveries.tokens.get(handle, [])
            if handle in aborted:
                assert got == expected[: len(got)]
                assert handle not in deliveries.finish_reasons
            else:
                assert got == expected
                assert deliveries.finish_reasons[handle] == "length"
            said = [] if num is None else expected_logprobs(prompt, got, num)
            assert deliveries.logprobs.get(handle, []) == said
        of_prompt = [] if num is None else expected_logprobs(prompt[:1], prompt[1:], num)
        said = deliveries.prompt_logprobs.get(first, [])
        assert said == of_prompt[: len(said)]
        assert first in aborted or said == of_prompt
    assert all(handle in requests for handle in deliveries.prompt_logprobs)
    check_idle(scheduler)
    return scheduler, worker


DECODES_TAKE_WHAT_AN_URGENT_PROMPT_NEEDS = {
    "limits": {
        "num_blocks": 12,
        "block_size": BLOCK_SIZE,
        "max_num_seqs": 5,
        "max_num_batched_tokens": 13,
        "max_model_len": MAX_MODEL_LEN,
        "policy": "priority",
        "enable_prefix_caching": False,
    },
    "requests": [
        ([0] * length, max_tokens, arrival, None, None, 1, None)
        for length, max_tokens, arrival in (
            (9, 1, 4), (1, 5, 0), (5, 5, 0), (5, 5, 0), (2, 4, 0), (1, 1, 0), (1, 1, 0), (1, 1, 0)
        )
    ],
}  # fmt: skip


A_THRESHOLD_IS_BEYOND_THE_BUDGET = {
    "limits": {
        "num_blocks": 25,
        "block_size": BLOCK_SIZE,
        "max_num_seqs": 6,
        "max_num_batched_tokens": 6,
        "max_model_len": MAX_MODEL_LEN,
        "long_prefill_token_threshold": 8,
        "policy": "priority",
        "enable_prefix_caching": True,
    },
    "requests": [
        ([0] * 5, 1, 7, None, None, 1, None),
        ([0, 0, 0, 0, 0, 0, 0, 3, 0, 0, 0], 18, 0, None, "a", 1, None),
        ([0] * 7, 13, 9, None, None, 2, 1),
        ([0, 0, 0, 0, 0, 0, 0, 3, 0, 3, 2, 2, 0, 2, 0, 0, 0], 11, 6, 9, "a", 4, None),
        ([0, 0, 0, 0, 0, 0, 0, 3, 0, 2, 3, 1, 3, 0, 1, 1, 0], 17, 10, 9, None, 1, None),
    ],
}


@example(A_THRESHOLD_IS_BEYOND_THE_BUDGET, 2)
@example(DECODES_TAKE_WHAT_AN_URGENT_PROMPT_NEEDS, 1)
@settings(max_examples=examples(120), deadline=None)
@given(workloads(), st.sampled_from([1, 2, 3]))
def test_every_request_gets_its_tokens_once_and_in_order(workload: dict, depth: int) -> None:
    run(workload, depth)


@settings(max_examples=examples(120), deadline=None)
@given(workloads(), st.sampled_from([2, 3]))
def test_pipeline_stages_get_every_token_in_time(workload: dict, num_stages: int) -> None:
    run(workload, depth=num_stages, num_groups=num_stages)


@settings(max_examples=examples(100), deadline=None)
@given(
    workloads(),
    st.sampled_from([1, 1, 2, 3]),
    st.integers(1, 4),
    st.booleans(),
    st.sampled_from([None, FakeProposer]),
)
def test_drafts_change_no_token_whatever_is_accepted_of_them(
    workload: dict,
    num_stages: int,
    num_drafts: int,
    withholds: bool,
    proposer: type[FakeProposer] | None,
) -> None:
    run(
        workload,
        depth=num_stages,
        num_groups=num_stages,
        withholds=withholds,
        num_levels=1,  # a draft's block may be the one that an urgent prompt would have had
        num_speculative_tokens=num_drafts,
        proposer=proposer,
    )


@settings(max_examples=examples(60), deadline=None)
@given(workloads(), st.sampled_from([1, 2, 3]))
def test_without_preemption_or_hits_no_token_is_computed_twice(workload: dict, depth: int) -> None:
    requests = [(prompt, max_tokens, arrival, None, *more)
                for prompt, max_tokens, arrival, _, *more in workload["requests"]]  # fmt: skip
    quiet = {"limits": workload["limits"], "requests": requests}
    _, worker = run(quiet, depth, num_blocks=200, enable_prefix_caching=False, policy="fcfs")
    # The last token of a request is delivered and never computed.
    assert worker.num_tokens == sum(
        (len(prompt) + max_tokens - 1) * n for prompt, max_tokens, *_, n, _ in requests
    )
