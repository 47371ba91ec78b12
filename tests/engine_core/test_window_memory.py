"""What a request of a model with windows takes of the memory, beside what it must take."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from nanocore.engine_core.process.cache_size import cache_groups
from nanocore.worker.memory.kv_groups import (
    CacheKind,
    KVGroup,
    LayerGroup,
    joined_groups,
    rank_slab_bytes,
)
from tests.engine_core.scheduler_checks import check_idle
from tests.fakes import Deliveries, FakeExecutor, TalliedScheduler, make_request, make_scheduler

BLOCK_SIZE = 16
LAYER_BYTES = 4096
"""K and V of a block in one layer."""


def layers(num_full: int, num_windows: int, window: int) -> list[LayerGroup]:
    return [
        LayerGroup(CacheKind(), num_full, num_full * LAYER_BYTES),
        LayerGroup(CacheKind(window=window), num_windows, num_windows * LAYER_BYTES),
    ]


def engine(
    groups: Sequence[KVGroup], num_slabs: int, max_model_len: int, chunk: int
) -> tuple[TalliedScheduler, FakeExecutor]:
    scheduler, executor = make_scheduler(
        num_blocks=num_slabs,
        block_size=BLOCK_SIZE,
        max_num_batched_tokens=chunk,
        max_model_len=max_model_len,
        cache_groups=cache_groups(groups, BLOCK_SIZE),
    )
    executor.checks_kv = False
    return scheduler, executor


def held_bytes(scheduler: TalliedScheduler, groups: Sequence[KVGroup], slab_bytes: int) -> float:
    """Memory of the slabs in which a request holds a block."""
    arena = scheduler.kv_cache._arena
    assert arena is not None
    return (arena.num_slabs - arena.num_empty) * slab_bytes


def run(
    own: list[LayerGroup], num_prompt: int, num_output: int, chunk: int
) -> tuple[float, float, list[int]]:
    """Most bytes that a request holds while its prompt is computed, and at its end; its tokens."""
    groups, length = joined_groups([own]), num_prompt + num_output
    slab_bytes = rank_slab_bytes(own, groups)
    scheduler, executor = engine(groups, 2 * length // BLOCK_SIZE, length, chunk)
    executor.sample = lambda context: len(context) % 7
    deliveries, most, last = Deliveries(), 0.0, 0.0
    prompt = [i % 50 for i in range(num_prompt)]
    sizes = {"block_size": BLOCK_SIZE, "max_model_len": length}
    scheduler.add(make_request(1, prompt, num_output, **sizes))
    while scheduler.num_requests:
        deliveries.step(scheduler, executor)
        last = held_bytes(scheduler, groups, slab_bytes) or last
        most = max(most, last)
    check_idle(scheduler)
    return most, last, deliveries.tokens[1]


@pytest.mark.parametrize("chunk", [64, 512])
def test_ten_of_twelve_layers_with_a_window_of_32_take_less_than_a_third_at_3000_tokens(
    chunk: int,
) -> None:
    most, last, tokens = run(layers(2, 10, 32), 2900, 100, chunk)
    whole = -(-2999 // BLOCK_SIZE) * 12 * LAYER_BYTES
    assert tokens == [(2900 + i) % 7 for i in range(100)]
    assert last <= 0.20 * whole
    assert most <= 0.30 * whole


@pytest.mark.parametrize(("num_full", "num_windows"), [(8, 40), (3, 15), (10, 52)])
def test_gemma_3_holds_what_its_layers_must_see_at_32768_tokens(
    num_full: int, num_windows: int
) -> None:
    """Of 12B, 270M and 27B."""
    _, last, _ = run(layers(num_full, num_windows, 1024), 32_700, 68, 2048)
    least = (32_768 * num_full + 1024 * num_windows) / BLOCK_SIZE * LAYER_BYTES
    assert least < last <= 1.05 * least
