"""The columns that keep Python away from rows to which nothing happens."""

from __future__ import annotations

import numpy as np
import pytest

from nanocore.engine_core.scheduling.row_table import RowTable
from nanocore.kv_cache import Block
from tests.fakes import Deliveries, make_request, make_scheduler


def test_a_decoding_row_is_quiet_until_its_blocks_are_full_or_its_last_token_is_due() -> None:
    # Blocks of 4. 3 prompt tokens and 8 outputs: token number 10, the 10th computed, is the last.
    table = RowTable(max_num_seqs=2, max_model_len=16)
    request = make_request(1, [1] * 3, 8)
    row = table.add(request, request.give_tokens(), 0, 4)
    quiet_until = [int(table.quiet_until[row])]
    for held_tokens in (8, 12):
        table.hold(request, held_tokens)
        quiet_until.append(int(table.quiet_until[row]))
    assert quiet_until == [4, 8, 9]


def test_a_row_asks_for_blocks_where_it_crosses_into_them_and_its_last_token_is_foreseen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scheduler, executor = make_scheduler(block_size=4)
    deliveries, asked, last = Deliveries(), [], []
    allocate = scheduler.kv_cache.allocate

    def noted(handle: int, num_tokens: int, *hits: list[Block]) -> list[int] | None:
        asked.append(num_tokens)
        return allocate(handle, num_tokens, *hits)

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
    table = RowTable(max_num_seqs=2, max_model_len=8)
    tokens = np.array([4, 5, 6, 7, 100_000], np.int32)
    assert table.may_stop(tokens) == []
    prompt = np.ones(1, np.int32)
    first = table.add(make_request(1, [1], 3, eos=(5,)), prompt, 0, 4)
    assert table.may_stop(tokens) == [1]
    table.add(make_request(2, [1], 3, stop_token_ids=(6,)), prompt, 0, 4)
    assert table.may_stop(tokens) == [1, 2]
    table.remove(first)
    assert table.may_stop(tokens) == [2]
