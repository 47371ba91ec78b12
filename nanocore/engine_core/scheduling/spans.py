"""Spans of columns: whose entries lie side by side, so many of each."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.integer]


def places(counts: IntArray) -> IntArray:
    """0, 1, ... for each owner's entries; int [entries]."""
    return np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)


def places_of(wanted: IntArray, owners: IntArray) -> IntArray:
    """The place of each of these among the owners, who are distinct and in any order."""
    order = np.argsort(owners)
    return order[np.searchsorted(owners, wanted, sorter=order)]


def spans(starts: IntArray, counts: IntArray) -> IntArray:
    """Indices of entries, by where an owner's begin and how many there are."""
    return np.repeat(starts, counts) + places(counts)


def attended_tokens(count: Any, end: Any) -> Any:
    """What the last `count` of a row's first `end` tokens attend to, in sum; numbers or columns."""
    return count * (end - count) + count * (count + 1) // 2
