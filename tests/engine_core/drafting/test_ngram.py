"""N-gram drafts against a search in plain Python."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanocore.engine_core.drafting.ngram import NgramProposer
from nanocore.engine_core.drafting.proposer import NUM_EVIDENCE
from nanocore.kernels.cpu.library import Library

MAX_DRAFTS = 6


def expected(text: list[int], most: int, shortest: int, longest: int) -> list[int]:
    for length in range(min(longest, len(text) - 1), shortest - 1, -1):
        ends = [
            end
            for end in range(len(text) - 1, length - 1, -1)
            if text[end - length : end] == text[-length:]
        ]
        if ends:
            end = next((end for end in ends if len(text) - end >= most), ends[0])
            run = text[end:]
            return [run[i % len(run)] for i in range(most)]
    return []


def propose(
    proposer: NgramProposer, table: np.ndarray, texts: list[list[int]], most: list[int]
) -> list[list[int]]:
    rows = np.array([2 * i + 1 for i in range(len(texts))], np.int64)
    for row, text in zip(rows, texts, strict=True):
        table[row, : len(text)] = text
        table[row, len(text) :] = text[-1]  # what is behind the known tokens is not read
    sizes = np.array([len(text) for text in texts], np.int64)
    found = proposer.propose(rows, sizes, np.array(most, np.int64))
    assert (found.evidence < NUM_EVIDENCE).all()
    return [ids[:n].tolist() for ids, n in zip(found.token_ids, found.counts, strict=True)]


TEXTS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=200), min_size=1, max_size=3)


@settings(deadline=None)
@given(
    texts=TEXTS,
    most=st.lists(st.integers(0, MAX_DRAFTS + 2), min_size=3, max_size=3),
    limits=st.lists(st.integers(1, 12), min_size=2, max_size=2).map(sorted),
)
def test_drafts_are_those_of_a_plain_search(
    native: Library, texts: list[list[int]], most: list[int], limits: list[int]
) -> None:
    table = np.zeros((8, 208), np.int32)
    proposer = NgramProposer(
        native, table, MAX_DRAFTS, prompt_lookup_min=limits[0], prompt_lookup_max=limits[1]
    )
    assert propose(proposer, table, texts, most[: len(texts)]) == [
        expected(text, min(n, MAX_DRAFTS), *limits) if n else []
        for text, n in zip(texts, most, strict=False)
    ]


@pytest.mark.parametrize(
    ("text", "drafts"),
    [
        ([1, 2, 3, 4, 5, 6, 1, 2, 7, 1, 2], [3, 4, 5, 6]),  # the latest has 3 tokens behind it
        ([9, 1, 2, 1, 2], [1, 2, 1, 2]),  # no occurrence has 4: it is taken to repeat itself
        ([5, 1, 2, 8, 8, 8, 8, 8, 7, 1, 2, 9, 9, 9, 9, 5, 1, 2], [8, 8, 8, 8]),  # the longest
        ([1, 2, 3], []),
        ([1], []),
    ],
)
def test_the_longest_and_latest_with_enough_tokens_behind_it_wins(
    native: Library, text: list[int], drafts: list[int]
) -> None:
    table = np.zeros((2, 32), np.int32)
    proposer = NgramProposer(native, table, 4, prompt_lookup_min=2, prompt_lookup_max=3)
    assert propose(proposer, table, [text], [4]) == [drafts]


def test_the_search_ends_after_65536_tokens(native: Library) -> None:
    table = np.zeros((2, 70_000), np.int32)
    proposer = NgramProposer(native, table, 2, prompt_lookup_min=2, prompt_lookup_max=3)
    filler = list(range(10, 10 + 65_534))
    assert propose(proposer, table, [[1, 2, *filler[:-2], 1, 2]], [2]) == [filler[:2]]
    assert propose(proposer, table, [[1, 2, *filler, 1, 2]], [2]) == [[]]


def test_evidence_tells_long_matches_and_early_drafts(native: Library) -> None:
    table = np.zeros((2, 400), np.int32)
    proposer = NgramProposer(native, table, 4, prompt_lookup_min=2, prompt_lookup_max=2)
    classes = Counter[int]()
    for length in (2, 5, 100):
        run = list(range(10, 10 + length))
        propose(proposer, table, [[*run, 1, 2, 3, 4, 0, *run]], [4])
        found = proposer.propose(*(np.array([n], np.int64) for n in (1, 2 * length + 5, 4)))
        classes.update(found.evidence[0].tolist())
    assert sorted(classes.elements()) == [8, 9, 10, 10, 24, 25, 26, 26, 56, 57, 58, 58]


def test_tables_of_other_kinds_are_refused(native: Library) -> None:
    for table in (np.zeros((2, 8), np.int64), np.zeros((8, 2), np.int32).T):
        with pytest.raises(ValueError, match="give a contiguous int32"):
            NgramProposer(native, table, 4, prompt_lookup_min=2, prompt_lookup_max=2)
