"""The times between tokens, however rows come and go, are those that a walk over rows finds."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from nanocore.engine_core.scheduling.columns import IntArray, TokenTimes

NUM_ROWS = 4
STEPS = st.lists(st.tuples(st.sets(st.integers(0, NUM_ROWS - 1)), st.booleans()), max_size=30)


def intervals_of(times: TokenTimes, rows: IntArray, now_s: float) -> list[float]:
    """The intervals that these tokens end, one of each row."""
    times.stamp(rows, now_s)
    found = times.intervals
    if found is None:
        return []
    return [found[0]] * found[1] if isinstance(found, tuple) else found.tolist()


@given(STEPS, st.dictionaries(st.integers(0, 29), st.integers(0, NUM_ROWS - 1)))
def test_intervals_are_those_of_each_row(
    steps: list[tuple[set[int], bool]], given_away: dict[int, int]
) -> None:
    """given_away: rows that another request gets, by the step before which it does."""
    times = TokenTimes(NUM_ROWS)
    last: dict[int, float] = {}
    found, expected = [], []
    rows = np.zeros(0, np.int64)
    for i, (sampled, has_same_array) in enumerate(steps):
        if i in given_away:
            row = given_away[i]
            assert times.of(row) == last.pop(row, 0.0)
            times.set(row, 0.0)
        now_s = 1.0 + i * i  # no two intervals are alike
        if not (has_same_array and sorted(sampled) == rows.tolist()):
            rows = np.array(sorted(sampled), np.int64)
        found += intervals_of(times, rows, now_s)
        expected += [now_s - last[row] for row in sampled if row in last]
        last |= dict.fromkeys(sampled, now_s)
    assert sorted(found) == sorted(expected)
    assert [times.of(row) for row in range(NUM_ROWS)] == [last.get(r, 0.0) for r in range(NUM_ROWS)]


def test_steps_of_the_same_rows_write_no_column() -> None:
    times, rows = TokenTimes(2), np.array([0, 1])
    found = []
    for now_s in (1.0, 2.0, 4.0):
        times.stamp(rows, now_s)
        found.append(times.intervals)
    first, *others = found
    assert not isinstance(first, tuple)
    assert others == [(1.0, 2), (2.0, 2)]


def test_a_preempted_request_takes_its_time_along() -> None:
    times = TokenTimes(2)
    times.stamp(np.array([0]), 1.0)
    times.set(1, times.of(0))
    assert intervals_of(times, np.array([1]), 5.0) == [4.0]
