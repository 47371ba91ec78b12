"""What steps read and compute: worked numbers, and columns of steps as single ones."""

from __future__ import annotations

import numpy as np
import pytest

from nanocore.worker.model_cost import (
    AttentionCost,
    MachineSpeed,
    ModelCost,
    chunk_work,
    decode_work,
)

FULL = AttentionCost(window=0, kv_bytes=40, pair_flops=100)
SLIDING = AttentionCost(window=8, kv_bytes=10, pair_flops=20)


def dense(*attention: AttentionCost) -> ModelCost:
    return ModelCost(
        num_params=1300,
        token_params=1000,
        head_params=200,
        weight_bytes=2400,
        attention=list(attention),
    )


def seen_one_by_one(window: int, count: int, num_tokens: int) -> list[int]:
    positions = range(num_tokens - count, num_tokens)
    return [len(range(max(0, p - window + 1) if window else 0, p + 1)) for p in positions]


@pytest.mark.parametrize("window", [0, 1, 5, 8, 30])
@pytest.mark.parametrize(("count", "num_tokens"), [(1, 1), (1, 9), (9, 9), (4, 7), (5, 23)])
def test_pairs_and_what_is_read_are_those_of_each_token(
    window: int, count: int, num_tokens: int
) -> None:
    kind = AttentionCost(window=window, kv_bytes=1, pair_flops=1)
    sees = seen_one_by_one(window, count, num_tokens)
    assert kind.pairs(num_tokens, count) == sum(sees)
    first = num_tokens - count + 1 - sees[0]  # of those that the first one sees, and all behind it
    assert kind.seen(num_tokens, count) == num_tokens - first


def test_columns_are_as_their_numbers() -> None:
    ends, counts = np.array([1, 8, 9, 100]), np.array([1, 3, 9, 40])
    for kind in (FULL, SLIDING):
        pairs = zip(ends.tolist(), counts.tolist(), strict=True)
        assert kind.seen(ends, counts).tolist() == [kind.seen(*pair) for pair in pairs]
        pairs = zip(ends.tolist(), counts.tolist(), strict=True)
        assert kind.pairs(ends, counts).tolist() == [kind.pairs(*pair) for pair in pairs]


def test_a_decode_step_reads_weights_once_and_the_context_of_each_row() -> None:
    work = decode_work(dense(FULL, SLIDING), num_rows=3, context=20)
    assert work.num_bytes == 2400 + 3 * (20 * 40 + 8 * 10)
    assert work.flops == 3 * (2 * 1000 + 2 * 200 + 20 * 100 + 8 * 20)


def test_a_prompts_head_is_computed_once_at_its_end() -> None:
    cost = dense(FULL)
    first, last = chunk_work(cost, 0, 6, False), chunk_work(cost, 6, 10, True)
    assert first.flops == 6 * 2000 + 21 * 100
    assert last.flops == 4 * 2000 + (7 + 8 + 9 + 10) * 100 + 400
    assert (first.num_bytes, last.num_bytes) == (2400 + 6 * 40, 2400 + 10 * 40)


def test_of_experts_a_step_reads_as_many_as_its_tokens_choose() -> None:
    cost = ModelCost(
        num_params=10_000,
        token_params=1000,
        head_params=200,
        expert_params=8000,
        num_experts=8,
        num_experts_per_tok=2,
        weight_bytes=2400,
        expert_bytes=16_000,
        attention=[],
    )
    assert cost.active_params == 10_000 - 8000 * 6 // 8
    assert cost.read_weight_bytes(1) == 2400 + 16_000 * 2 / 8
    assert cost.read_weight_bytes(2) == 2400 + 16_000 * (1 - (6 / 8) ** 2)
    assert cost.read_weight_bytes(1000) == pytest.approx(2400 + 16_000)
    assert decode_work(cost, 2, 5).flops == 2 * (2 * (1000 + 2000) + 400)


def test_ranks_together_read_and_compute_what_each_does() -> None:
    one, other = dense(FULL, SLIDING), dense(SLIDING)
    whole = ModelCost.joined([one, other])
    assert whole.num_params == 1300
    for context in (5, 50):
        parts = [decode_work(cost, 4, context) for cost in (one, other)]
        joined = decode_work(whole, 4, context)
        assert joined.num_bytes == sum(part.num_bytes for part in parts)
        assert joined.flops == sum(part.flops for part in parts)


def test_a_step_takes_as_long_as_the_slower_of_reading_and_computing() -> None:
    speed = MachineSpeed(bytes_per_s=100, flops_per_s=1000)
    assert speed.least_s(num_bytes=200, flops=500) == 2
    assert speed.least_s(num_bytes=200, flops=5000) == 5


def test_what_caches_hold_is_read_faster_and_the_rest_as_ever() -> None:
    speed = MachineSpeed(bytes_per_s=10, flops_per_s=1e9, near_bytes=50, near_bytes_per_s=100)
    assert speed.least_s(40, 0) == 0.4
    assert speed.least_s(70, 0) == 0.5 + 2
    halves = [speed.shared(2)] * 2
    assert MachineSpeed.joined(halves) == speed
