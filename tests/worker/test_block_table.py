"""The block table of chosen rows stays that of the rows, whatever happens to them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from nanocore.worker.batch import block_table
from nanocore.worker.batch.block_table import BlockTable
from tests.campaign import examples

NUM_ROWS = 5
NUM_COLUMNS = 12


def ids(*values: int) -> NDArray[np.int32]:
    return np.array(values, np.int32)


def make_table() -> BlockTable:
    return BlockTable(NUM_ROWS, NUM_COLUMNS)


@settings(max_examples=examples(100), deadline=None)
@given(st.data())
def test_selected_rows_hold_the_blocks_they_were_given(data: st.DataObject) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(block_table, "SPARE_COLUMNS", 1)
        table = make_table()
        expected: list[list[int]] = [[] for _ in range(NUM_ROWS)]
        rows_B, block_id = np.arange(NUM_ROWS), 0
        for _ in range(data.draw(st.integers(1, 25))):
            match data.draw(st.sampled_from(["append", "append", "append", "restart", "choose"])):
                case "append":
                    counts = [data.draw(st.integers(0, 2)) for _ in range(NUM_ROWS)]
                    room = [NUM_COLUMNS - len(held) for held in expected]
                    rows = [
                        row for row in range(NUM_ROWS) for _ in range(min(counts[row], room[row]))
                    ]
                    new = list(range(block_id, block_id := block_id + len(rows)))
                    if rows:
                        table.append(ids(*rows), ids(*new))
                    for row, value in zip(rows, new, strict=True):
                        expected[row].append(value)
                case "restart":
                    row = data.draw(st.integers(0, NUM_ROWS - 1))
                    expected[row] = [block_id, block_id + 1]
                    block_id += 2
                    table.set_row(row, ids(*expected[row]))
                    table.clear_kept()
                case "choose":
                    chosen = data.draw(st.lists(st.integers(0, NUM_ROWS - 1), unique=True))
                    rows_B = np.array(chosen or [0], np.int64)
                    table.clear_kept()
            for row, held in enumerate(expected):
                assert table.ids[row, : len(held)].tolist() == held
            for selected in (table.select_kept(0, rows_B), table.select(rows_B)):
                assert len(selected) == len(rows_B)
                for row, row_ids in zip(rows_B.tolist(), selected.tolist(), strict=True):
                    assert row_ids[: len(expected[row])] == expected[row]
                    assert set(row_ids) <= set(range(block_id)) | {0}


@pytest.mark.parametrize("rows", [[1, 2], [0, 2]])
def test_a_table_is_kept_until_it_is_forgotten(rows: list[int]) -> None:
    table, rows_B = make_table(), np.array(rows)
    first = table.select_kept(0, rows_B)
    table.append(ids(2), ids(7))
    assert table.select_kept(0, rows_B) is first
    assert table.select_kept(1, rows_B[:1]).shape[0] == 1
    assert table.select(rows_B[:1]).shape[0] == 1
    assert table.select_kept(0, rows_B) is first
    assert first[1, 0] == 7
    table.clear_kept()
    assert table.select_kept(0, rows_B[1:])[:, 0].tolist() == [7]


def test_a_copy_that_is_full_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_table, "SPARE_COLUMNS", 1)
    table, rows_B = make_table(), np.array([0, 2])
    assert table.select_kept(0, rows_B).shape == (2, 1)
    table.append(ids(0, 0, 2), ids(4, 5, 6))
    assert table.select_kept(0, rows_B)[:, :2].tolist() == [[4, 5], [6, 0]]
