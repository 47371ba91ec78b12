"""Suffix drafts against a search in plain Python, over tiny alphabets."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanocore.engine_core.drafting.suffix import SuffixProposer
from nanocore.kernels.cpu.library import Library
from tests.engine_core.drafting import suffix_oracle as oracle
from tests.engine_core.drafting.suffix_oracle import Settings

MAX_DRAFTS = 12
DEFAULTS = Settings()
SETTINGS = st.builds(
    Settings,
    max_depth=st.integers(1, 24),
    max_factor=st.sampled_from([0.5, 1.0, 1.5, 4.0]),
    min_probability=st.sampled_from([0.0, 0.1, 0.3, 0.5, 0.9]),
)
PERIODIC = st.builds(
    lambda unit, times, tail: [*unit * times, *tail],
    st.lists(st.integers(0, 3), min_size=1, max_size=5),
    st.integers(1, 60),
    st.lists(st.integers(0, 3), max_size=4),
)
TEXT = st.lists(st.integers(0, 2), max_size=80) | PERIODIC


class Case:
    """A proposer over a table of its own, and what its rows know."""

    def __init__(
        self,
        native: Library,
        chosen: Settings = DEFAULTS,
        num_rows: int = 4,
        row_size: int = 400,
        max_cached: int = 0,
        max_bytes: int = 1 << 28,
    ) -> None:
        self.settings = chosen
        self.table = np.zeros((num_rows, row_size), np.int32)
        self.texts: dict[int, list[int]] = {}
        self.salts: dict[int, str] = {}
        self.shared = oracle.SharedOutputs(max_cached, chosen.max_depth)
        self.proposer = SuffixProposer(
            native, self.table, MAX_DRAFTS,
            suffix_decoding_max_tree_depth=chosen.max_depth,
            suffix_decoding_max_cached_requests=max_cached,
            suffix_decoding_max_spec_factor=chosen.max_factor,
            suffix_decoding_min_token_prob=chosen.min_probability,
            max_bytes=max_bytes,
        )  # fmt: skip

    def begin(self, row: int, salt: str = "") -> None:
        self.texts[row], self.salts[row] = [], salt
        self.shared.begin(row, salt)
        self.proposer.begin(row, salt)

    def grow(self, row: int, tokens: list[int]) -> None:
        size = len(self.texts[row])
        self.table[row, size : size + len(tokens)] = tokens
        self.texts[row] += tokens

    def end(self, row: int, num_prompt: int = 0, has_finished: bool = True) -> None:
        text = self.texts.pop(row)
        self.proposer.end(row, num_prompt, len(text), has_finished)
        self.table[row] = 77  # it may be another's at once
        if has_finished and self.shared.max_cached and num_prompt < len(text):
            self.shared.waiting.append((self.salts[row], text[num_prompt:]))

    def propose(self, rows: list[int], most: int = MAX_DRAFTS) -> list[tuple[list[int], list[int]]]:
        """Drafts and their evidence."""
        sizes = [len(self.texts[row]) for row in rows]
        found = self.proposer.propose(
            np.array(rows, np.int64), np.array(sizes, np.int64), np.full(len(rows), most)
        )
        return [
            (found.token_ids[i, :n].tolist(), found.evidence[i, :n].tolist())
            for i, n in enumerate(found.counts.tolist())
        ]

    def expected(self, row: int, most: int = MAX_DRAFTS) -> tuple[list[int], list[int]]:
        """The draft of most expected tokens: its own, or by young or by old outputs."""
        best, text = self.expected_own(row, most), self.texts[row]
        group = self.shared.groups.get(self.salts[row], oracle.Group())
        for generation in (group.young, group.old):
            if generation:
                match = self.shared.match(row, generation, text)
                other = oracle.draft(generation.texts, match, False, most, self.settings)
                if other.sum > best.sum:
                    self.shared.reached.add("took a shared one")
                    best = other
        return best.token_ids, best.evidence

    def expected_own(self, row: int, most: int = MAX_DRAFTS) -> oracle.Draft:
        text = self.texts[row]
        if len(text) < 2:
            return oracle.Draft()
        return oracle.draft([text], oracle.own_match(text), True, most, self.settings)


@settings(deadline=None)
@given(text=TEXT, cuts=st.lists(st.integers(1, 9), min_size=1), most=st.integers(0, MAX_DRAFTS + 1),
       chosen=SETTINGS)  # fmt: skip
def test_a_row_repeats_its_own_text(
    native: Library, text: list[int], cuts: list[int], most: int, chosen: Settings
) -> None:
    case = Case(native, chosen)
    case.begin(2)
    start = 0
    while start < len(text):
        size = cuts[start % len(cuts)]
        case.grow(2, text[start : start + size])
        start += size
        wanted = case.expected_own(2, min(most, MAX_DRAFTS))
        assert case.propose([2], most) == [(wanted.token_ids, wanted.evidence)]


TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=12)
OPERATIONS = st.lists(
    st.tuples(st.sampled_from(["grow", "grow", "propose", "end", "preempt"]), st.integers(0, 3),
              TOKENS, st.sampled_from("abc")),
    min_size=20, max_size=60,
)  # fmt: skip


def follow(case: Case, operations: list[tuple[str, int, list[int], str]]) -> None:
    """Do what is asked for, and compare all drafts."""
    for kind, row, tokens, salt in operations:
        if row not in case.texts:
            case.begin(row, salt)
        if kind in ("grow", "propose"):
            case.grow(row, tokens)
        else:
            case.end(row, min(len(tokens), len(case.texts[row])), kind == "end")
        if kind == "propose":
            case.shared.add_waiting()
            rows = [row for row in case.texts if case.texts[row]]
            assert case.propose(rows) == [case.expected(row) for row in rows]


@settings(deadline=None)
@given(operations=OPERATIONS, chosen=SETTINGS, max_cached=st.integers(0, 7))
def test_rows_draft_from_finished_outputs_of_their_salt(
    native: Library,
    operations: list[tuple[str, int, list[int], str]],
    chosen: Settings,
    max_cached: int,
) -> None:
    follow(Case(native, chosen, max_cached=max_cached, row_size=800), operations)


@pytest.mark.parametrize("max_cached", [1, 2, 5])
def test_old_generations_of_salts_are_dropped(native: Library, max_cached: int) -> None:
    rng = random.Random(max_cached)
    case = Case(native, max_cached=max_cached, row_size=800)
    kinds = ["grow", "propose", "end", "end", "preempt"]
    for _ in range(300):
        tokens = [rng.randint(0, 2) for _ in range(rng.randint(1, 12))]
        salt = rng.choice("aaaabc")
        follow(case, [(rng.choice(kinds), rng.randint(0, 3), tokens, salt)])
    wanted = {"rotated", "dropped a young one", "took a shared one"}
    if max_cached > 1:
        wanted |= {"rotated twice", "dropped an old one"}
    assert case.shared.reached >= wanted


def test_no_draft_crosses_two_outputs_or_salts(native: Library) -> None:
    case = Case(native, max_cached=10)
    for text in ([1, 2, 3], [4, 5, 6]):
        case.begin(0, "a")
        case.grow(0, text)
        case.end(0)
    for salt, tokens, drafts in (
        ("a", [9, 2], [3]), ("a", [2, 3], []), ("a", [9, 4, 5], [6]), ("b", [4, 5], [])
    ):  # fmt: skip
        case.begin(1, salt)
        case.grow(1, tokens)
        assert case.propose([1])[0][0] == drafts, (salt, tokens)
        case.end(1, has_finished=False)


def test_long_rows_catch_up_over_several_calls(native: Library) -> None:
    case = Case(native, num_rows=2, row_size=10_000)
    text = [*range(4500), 1, 2]
    for row in (0, 1):
        case.begin(row)
        case.grow(row, text)
    # Row 0 takes 4,096 and 406 tokens, and row 1 what is left of three calls.
    drafts = [[drafts for drafts, _ in case.propose([0, 1])] for _ in range(4)]
    assert drafts == [[[], []], [[3, 4], []], [[3, 4], [3, 4]], [[3, 4], [3, 4]]]
    case.grow(0, [3])
    assert [drafts for drafts, _ in case.propose([0])] == [[4, 5, 6]]


def test_rows_beyond_the_limit_have_no_automaton(native: Library) -> None:
    size = 128 * 1024
    case = Case(native, num_rows=2, row_size=size + 8, max_cached=2)
    empty = case.proposer.num_bytes
    case.begin(0)
    case.grow(0, [*range(size - 2), 1, 2])
    for _ in range(size // 4096 - 1):
        assert case.propose([0]) == [([], [])]
    assert case.propose([0])[0][0] == [3, 4]
    assert case.proposer.num_bytes < empty + 120 * size
    case.grow(0, [3])
    assert case.propose([0]) == [([], [])]
    assert case.proposer.num_bytes == empty


def test_memory_is_given_back_and_bounded(native: Library) -> None:
    """Shared outputs go first, then rows get nothing."""
    limit = 300_000
    case = Case(native, num_rows=8, row_size=2000, max_cached=100, max_bytes=limit)
    empty = case.proposer.num_bytes
    case.begin(0)
    case.grow(0, [*range(600)])
    case.end(0)
    case.begin(1)
    case.grow(1, [500, 501])
    assert case.propose([1])[0][0] == [502, 503]
    shared = case.proposer.num_bytes
    assert shared > empty + 600 * 32
    for row in range(2, 8):
        case.begin(row)
        case.grow(row, [*range(1000), 0, 1])
    found = [case.propose([1, *range(2, 8)]) for _ in range(2)][-1]
    assert case.proposer.num_bytes <= limit + empty
    counts = [len(drafts) for drafts, _ in found]
    assert counts[0] == 0  # nothing is shared any more
    assert 0 < counts.count(2) < 6
    for row in range(1, 8):
        case.end(row, has_finished=False)
    assert case.proposer.num_bytes == empty


def test_without_memory_there_are_no_drafts(native: Library) -> None:
    case = Case(native, max_cached=4, max_bytes=10)
    case.begin(0)
    case.grow(0, [1, 2, 1])
    assert case.propose([0]) == [([], [])]
    case.end(0)


def test_of_many_salts_the_latest_used_are_kept(native: Library) -> None:
    case = Case(native, max_cached=1000)
    for i in range(300):
        case.begin(0, f"salt {i}")
        case.grow(0, [1, 2, 3])
        case.end(0)
        case.begin(1, "used")
        case.grow(1, [1, 2])
        if i == 0:
            case.proposer.end(1, 0, 2, True)
            case.begin(1, "used")
            case.grow(1, [1])
        drafts = case.propose([1])[0][0]
        assert drafts == ([2] if i == 0 else [])
        case.end(1, has_finished=False)
    for i, drafts in ((0, []), (299, [3])):
        case.begin(2, f"salt {i}")
        case.grow(2, [1, 2])
        assert [case.propose([2])[0][0][:1]] == [drafts]
        case.end(2, has_finished=False)


def test_long_outputs_are_added_over_several_calls(native: Library) -> None:
    case = Case(native, num_rows=2, row_size=3000, max_cached=4)
    case.begin(0)
    case.grow(0, [*range(2500)])
    case.end(0)
    case.begin(1)
    case.grow(1, [2400, 2401])
    drafts = [case.propose([1])[0][0] for _ in range(3)]
    assert drafts[0] == drafts[1] == []  # 1,024 and 2,048 tokens
    case.grow(1, [2402])
    assert case.propose([1])[0][0][:1] == [2403]
