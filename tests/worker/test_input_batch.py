"""The persistent batch against the fake worker, step by step, over random workloads."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from nanocore.kernels.logit_edits import TokenLists
from nanocore.kv_cache import FULL, CacheGroup
from nanocore.protocol.sampling import EngineSamplingParams
from nanocore.worker.plan import ModelRunnerOutput, NewRow, SchedulerOutput
from nanocore.worker.sampling.columns import RowColumns, SampledRows
from nanocore.worker.step.batch_step import BatchStep, StepOrder
from nanocore.worker.step.input_batch import InputBatch
from nanocore.worker.step.step_memory import BlockTable
from tests.campaign import examples
from tests.fakes import Deliveries, FakeExecutor, make_request, make_scheduler
from tests.step_plans import make_plan, make_row

BLOCK_SIZE = 4
MAX_MODEL_LEN = 40


SAMPLING = EngineSamplingParams(temperature=0.7, top_p=0.9)


GROUPS = [FULL, [CacheGroup("full"), CacheGroup("window(5)", 5, 2), CacheGroup("window(9)", 9)]]


def make_batch(max_num_seqs: int = 4, num_cache_groups: int = 1) -> InputBatch:
    return InputBatch(
        max_num_seqs, MAX_MODEL_LEN, BLOCK_SIZE, 50, num_cache_groups=num_cache_groups
    )


def check_step(
    batch: InputBatch, step: BatchStep, before: dict[int, int], executor: FakeExecutor
) -> None:
    counts = {row: executor.rows[row].num_computed - n for row, n in before.items()}
    counts = {row: count for row, count in counts.items() if count}
    rows = [row for row in sorted(counts) if counts[row] == 1]
    rows += [row for row in sorted(counts) if counts[row] > 1]
    of_token, positions, ends = [], [], [0]
    slots: list[list[int]] = [[] for _ in executor.cache_groups]
    for row in rows:
        state = executor.rows[row]
        for position in range(before[row], before[row] + counts[row]):
            of_token.append(row)
            positions.append(position)
            for own, block_ids in zip(slots, state.block_ids, strict=True):
                block_id = block_ids[position // BLOCK_SIZE]
                own.append(block_id * BLOCK_SIZE + position % BLOCK_SIZE)
        ends.append(len(positions))
    order = step.order
    assert order.rows_B.tolist() == rows
    assert order.rows_T.tolist() == of_token
    assert step.positions_T.tolist() == positions
    assert step.slots_GT.tolist() == slots
    assert order.query_start == order.query_start_A.tolist() == ends
    assert order.num_decodes == sum(counts[row] == 1 for row in rows)
    assert step.seq_lens_B.tolist() == [executor.rows[row].num_computed for row in rows]
    assert step.slot_counts.tolist() == [1] * len(step.sampling_rows)
    assert [rows[ends.index(i + 1) - 1] for i in step.sample_index.tolist()] == (
        step.sample_rows.tolist()
    )
    for row, length in zip(rows, step.seq_lens_B.tolist(), strict=True):
        width = -(-length // BLOCK_SIZE)
        held = [block_ids[:width] for block_ids in executor.rows[row].block_ids]
        assert batch.blocks.ids[:, row, :width].tolist() == held


@settings(max_examples=examples(100), deadline=None)
@given(st.data())
def test_inputs_equal_those_derived_the_slow_way(data: st.DataObject) -> None:
    groups = data.draw(st.sampled_from(GROUPS))
    scheduler, executor = make_scheduler(
        num_blocks=data.draw(st.integers(10 * len(groups), 20 * len(groups))),
        block_size=BLOCK_SIZE,
        max_num_seqs=4,
        max_num_batched_tokens=data.draw(st.integers(4, 30)),
        max_model_len=MAX_MODEL_LEN,
        cache_groups=groups,
    )
    batch, deliveries = make_batch(num_cache_groups=len(groups)), Deliveries()
    for handle in range(1, data.draw(st.integers(1, 7)) + 1):
        length = data.draw(st.integers(1, 24))
        prompt = [data.draw(st.integers(0, 2)) for _ in range(length)]
        max_tokens = data.draw(st.integers(1, 16))
        scheduler.add(make_request(handle, prompt, max_tokens, block_size=BLOCK_SIZE))
    while scheduler.num_requests:
        plan = scheduler.schedule()
        before = {row: state.num_computed for row, state in executor.rows.items()}
        before |= {new.row: new.num_computed_tokens for new in plan.added}
        result = executor.execute(plan)
        before = {row: count for row, count in before.items() if row in executor.rows}
        batch.apply(plan)
        if plan.num_tokens:
            step = batch.advance(plan)
            check_step(batch, step, before, executor)
            assert set(step.sample_rows.tolist()) == set(ints(result.rows))
            # The fake worker has sampled already.
            assert step.sample_positions.tolist() == [
                len(executor.rows[row].token_ids) - 1 for row in step.sample_rows.tolist()
            ]
            batch.append(step)
        deliveries.take(scheduler, result)


def ints(column: bytes) -> list[int]:
    return np.frombuffer(column, "<i4").tolist()


def new_row(row: int, sampling: EngineSamplingParams, seed: int, block_id: int = 0) -> NewRow:
    return make_row(row, [1], sampling, blocks=[block_id], seed=seed)


def plan_adding(*rows: tuple[int, EngineSamplingParams]) -> SchedulerOutput:
    added = [new_row(row, sampling, 100 + row) for row, sampling in rows]
    return make_plan(added, num_tokens=len(rows))


def sampling_of(batch: InputBatch, plan: SchedulerOutput) -> SampledRows:
    return batch.sampled_rows(batch.advance(plan))


def lists_of(sampled: SampledRows) -> TokenLists:
    assert sampled.sizes is not None
    return TokenLists.of(torch.from_numpy(sampled.columns["lists_L"]), sampled.sizes)


def test_sampling_columns_follow_their_rows() -> None:
    batch = make_batch()
    plan = plan_adding(
        (2, EngineSamplingParams(temperature=0.5, top_k=7, top_p=0.25, min_p=0.125)),
        (0, EngineSamplingParams(temperature=0.0)),
        (1, EngineSamplingParams(top_k=-1)),
    )
    batch.apply(plan)
    sampled = sampling_of(batch, plan)
    assert not sampled.all_greedy
    assert sampled.columns["processed_P"].tolist() == [2]
    values = {name: column.tolist() for name, column in sampled.columns.items()}
    assert (
        values.items()
        >= {
            "seed": [100, 101, 102],
            "num_prompt_tokens": [1, 1, 1],
            "temperature": [0.0, 1.0, 0.5],
            "top_k": [2**31 - 1, 2**31 - 1, 7],
            "top_p": [1.0, 1.0, 0.25],
            "min_p": [0.0, 0.0, 0.125],
        }.items()
    )


def test_lists_of_tokens_go_with_the_request_that_named_them() -> None:
    batch = make_batch()
    named = EngineSamplingParams(temperature=0.0, allowed_token_ids=[3, 4])
    batch.apply(plan := plan_adding((1, EngineSamplingParams()), (2, named), (0, named)))
    sampled = sampling_of(batch, plan)
    lists = lists_of(sampled)
    assert sampled.columns["processed_P"].tolist() == [0, 2]
    assert lists.allowed_starts_A.tolist() == [0, 2, 4]
    assert lists.allowed_N.tolist() == [3, 4, 3, 4]
    columns = RowColumns(1, 50)
    for sampling, is_named in ((named, True), (EngineSamplingParams(), False)):
        columns.set_row(new_row(0, sampling, 0, 0))
        assert (columns.of_rows(np.zeros(1, np.int64)).sizes is not None) == is_named


def test_rows_whose_logits_are_edited_come_first_among_those_that_ask() -> None:
    batch = make_batch()
    filtered = EngineSamplingParams(top_p=0.5)
    edited = EngineSamplingParams(presence_penalty=1.0)
    batch.apply(plan := plan_adding((0, filtered), (1, EngineSamplingParams()), (2, edited)))
    sampled = sampling_of(batch, plan)
    assert sampled.columns["processed_P"].tolist() == [2, 0]
    assert lists_of(sampled).num_rows == 1


def test_what_follows_from_the_rows_is_made_once_until_one_comes_or_goes() -> None:
    """Two groups of rows that decode; a request ends, and others take rows, its own too."""
    batch, sampling = InputBatch(6, MAX_MODEL_LEN, BLOCK_SIZE, 50, num_groups=2), SAMPLING
    seeds: dict[int, int] = {}

    def run(plan: SchedulerOutput) -> tuple[StepOrder, SampledRows]:
        for row in ints(plan.removed_rows):
            del seeds[row]
        seeds.update({new.row: new.seed for new in plan.added})
        batch.apply(plan)
        step = batch.advance(plan)
        sampled = batch.sampled_rows(step)
        rows = step.order.rows_B.tolist()
        assert set(rows) <= {row for row in seeds if row % 2 == plan.group}
        assert sampled.columns["seed"].tolist() == [seeds[row] for row in rows]
        batch.append(step)
        return step.order, sampled

    def kept(before: tuple[StepOrder, SampledRows], group: int, count: int) -> bool:
        order, sampled = run(make_plan(num_tokens=count, group=group))
        assert (order is before[0]) == (sampled is before[1])
        return order is before[0]

    run(
        make_plan(
            num_tokens=2, added=[new_row(row, sampling, row + 10, row + 10) for row in (0, 4)]
        )
    )
    odd = run(
        make_plan(
            num_tokens=2,
            group=1,
            added=[new_row(row, sampling, row + 20, row + 20) for row in (1, 5)],
        )
    )
    even = run(make_plan(num_tokens=2))
    assert kept(even, 0, 2)
    assert kept(odd, 1, 2)
    # A row that sits a step out changes nothing for the steps after it.
    run(make_plan(num_tokens=1, chunks={4: 0}))
    assert kept(even, 0, 2)
    # Another request in the same row: the rows are the same numbers.
    run(make_plan([new_row(4, sampling, 31, 31)], num_tokens=2, removed=[4]))
    run(make_plan(num_tokens=2))
    run(make_plan(num_tokens=2, group=1))
    run(make_plan(num_tokens=1, removed=[0]))
    run(make_plan([new_row(2, sampling, 32, 32)], num_tokens=2))


def test_a_temperature_above_every_float32_stays_finite() -> None:
    batch = make_batch()
    plan = plan_adding((0, EngineSamplingParams(temperature=1e308)))
    batch.apply(plan)
    assert sampling_of(batch, plan).columns["temperature"][0] == np.finfo(np.float32).max


def test_filters_of_greedy_rows_do_not_count() -> None:
    batch = make_batch()
    plan = plan_adding((0, EngineSamplingParams(temperature=0.0, top_k=5)))
    batch.apply(plan)
    sampled = sampling_of(batch, plan)
    assert sampled.all_greedy
    assert sampled.columns["processed_P"].tolist() == []


@pytest.mark.parametrize("top_k", [-1, 0, 50, 51, 2**31 - 1])
def test_a_top_k_that_leaves_every_token_is_no_filter(top_k: int) -> None:
    batch = make_batch()
    plan = plan_adding((0, EngineSamplingParams(top_k=top_k)))
    batch.apply(plan)
    assert sampling_of(batch, plan).num_processed == 0


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 9)), max_size=12))
def test_tokens_that_another_stage_sampled_go_to_their_rows_in_order(
    told: list[tuple[int, int]],
) -> None:
    batch = make_batch()
    batch.apply(plan_adding(*((row, EngineSamplingParams()) for row in range(4))))
    expected = {row: [1] for row in range(4)}
    places = []
    for row, token_id in told:
        places.append(len(expected[row]))
        expected[row].append(token_id)
    rows = np.array([row for row, _ in told], np.int32)
    assert batch.append_sampled(rows).tolist() == places
    assert batch.num_tokens[:4].tolist() == [len(held) for held in expected.values()]


def test_a_step_of_no_samples_returns_none() -> None:
    assert ModelRunnerOutput(rows=b"", token_ids=b"") == FakeExecutor(4, 4).execute(plan_adding())


NUM_ROWS = 5
NUM_COLUMNS = 12


def ids(*values: int) -> NDArray[np.int32]:
    return np.array(values, np.int32)


@settings(max_examples=examples(100), deadline=None)
@given(st.data())
def test_rows_hold_the_blocks_they_were_given(data: st.DataObject) -> None:
    """By group and row; block ids differ from group to group."""
    num_groups = data.draw(st.integers(1, 3))
    table = BlockTable(NUM_ROWS, NUM_COLUMNS, num_groups)
    expected: list[list[list[int]]] = [[[] for _ in range(NUM_ROWS)] for _ in range(num_groups)]
    block_id = 0
    for _ in range(data.draw(st.integers(1, 25))):
        if data.draw(st.integers(0, 3)):
            counts = [data.draw(st.integers(0, 2)) for _ in range(NUM_ROWS)]
            room = [NUM_COLUMNS - len(held) for held in expected[0]]
            rows = [row for row in range(NUM_ROWS) for _ in range(min(counts[row], room[row]))]
            rows = data.draw(st.permutations(rows))
            new = list(range(block_id, block_id := block_id + len(rows) * num_groups))
            appended = table.append(ids(*rows), ids(*new))
            own = [new[i * len(rows) : (i + 1) * len(rows)] for i in range(num_groups)]
            places = []
            for group, values in enumerate(own):
                for row, value in zip(rows, values, strict=True):
                    places.append((group * NUM_ROWS + row, len(expected[group][row])))
                    expected[group][row].append(value)
            assert [*zip(appended.rows.tolist(), appended.columns.tolist(), strict=True)] == places
            assert appended.block_ids.tolist() == new
        else:
            row = data.draw(st.integers(0, NUM_ROWS - 1))
            for held in expected:
                held[row] = [block_id, block_id := block_id + 1]
            table.set_row(row, ids(*(value for held in expected for value in held[row])))
        for group, rows_of_group in enumerate(expected):
            for row, values in enumerate(rows_of_group):
                assert table.ids[group, row, : len(values)].tolist() == values
