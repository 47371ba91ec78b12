"""The columns that keep Python away from rows to which nothing happens."""

from __future__ import annotations

import numpy as np

from nanocore.engine_core.scheduling.row_table import RowTable
from tests.fakes import Deliveries, make_request, make_scheduler


def test_a_decoding_row_is_quiet_until_its_blocks_are_full_or_its_last_token_is_due() -> None:
    # Blocks of 4. 3 prompt tokens and 8 outputs: token number 10, the 10th computed, is the last.
    scheduler, executor = make_scheduler(block_size=4)
    deliveries = Deliveries()
    scheduler.add(make_request(1, [1] * 3, 8))
    quiet_until = []
    while scheduler.num_requests:
        result = executor.execute(scheduler.schedule())
        quiet_until.append(int(scheduler.table.quiet_until[0]))
        deliveries.take(scheduler, result)
    # 3, 4, then 5 to 8, then 9 and 10 tokens are computed after the steps.
    assert quiet_until == [4, 4, 8, 8, 8, 8, 9, 9]


def test_only_tokens_that_end_some_row_are_looked_at() -> None:
    table = RowTable(max_num_seqs=2, max_model_len=8)
    tokens = np.array([4, 5, 6, 7, 100_000], np.int32)
    assert table.may_stop(tokens) == []
    first = table.add(make_request(1, [1], 3, eos=(5,)), 0, 4)
    assert table.may_stop(tokens) == [1]
    table.add(make_request(2, [1], 3, stop_token_ids=(6,)), 0, 4)
    assert table.may_stop(tokens) == [1, 2]
    table.remove(first)
    assert table.may_stop(tokens) == [2]
