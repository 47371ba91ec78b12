"""The columns that keep Python away from rows to which nothing happens."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from nanocore.engine_core.requests.ends import StopIds
from tests.fakes import Deliveries, make_request, make_scheduler


def test_a_decoding_row_is_quiet_until_its_blocks_are_full_or_its_last_token_is_due() -> None:
    # Blocks of 4. 3 prompt tokens and 8 outputs: token number 10, the 10th computed, is the last.
    scheduler, executor = make_scheduler(block_size=4)
    deliveries, quiet_until = Deliveries(), []
    scheduler.add(make_request(1, [1] * 3, 8))
    while scheduler.num_requests:
        deliveries.step(scheduler, executor)
        quiet_until += [int(scheduler.running.quiet_until[one.row]) for one in scheduler.running]
    assert quiet_until == [4, 4, 8, 8, 8, 8, 9]


def test_a_row_asks_for_blocks_where_it_crosses_into_them_and_its_last_token_is_foreseen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scheduler, executor = make_scheduler(block_size=4)
    deliveries, asked, last = Deliveries(), [], []
    allocate = scheduler.kv_cache.allocate

    def noted(handle: int, num_tokens: int, *prefix: Any) -> list[int] | None:
        asked.append(num_tokens)
        return allocate(handle, num_tokens, *prefix)

    monkeypatch.setattr(scheduler.kv_cache, "allocate", noted)
    scheduler.add(make_request(1, [1] * 3, 8))
    num_computed = 0
    while scheduler.num_requests:
        num_computed += deliveries.step(scheduler, executor).num_tokens
        if scheduler.completed.plan.last:
            last.append(num_computed)
    assert asked == [3, 5, 9]
    assert last == [10]


def test_only_tokens_that_end_some_row_are_looked_at() -> None:
    stop_ids = StopIds()
    tokens = np.array([4, 5, 6, 7, 100_000], np.int32)
    assert stop_ids.find(tokens) == []
    first = make_request(1, [1], 3, eos=(5,))
    stop_ids.add(first)
    assert stop_ids.find(tokens) == [1]
    stop_ids.add(make_request(2, [1], 3, stop_token_ids=(6,)))
    assert stop_ids.find(tokens) == [1, 2]
    stop_ids.remove(first)
    assert stop_ids.find(tokens) == [2]
