"""Suffix drafts against a search in plain Python, over tiny alphabets."""

from __future__ import annotations

import numpy as np
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
        self.proposer = SuffixProposer(
            native, self.table, MAX_DRAFTS,
            suffix_decoding_max_tree_depth=chosen.max_depth,
            suffix_decoding_max_cached_requests=max_cached,
            suffix_decoding_max_spec_factor=chosen.max_factor,
            suffix_decoding_min_token_prob=chosen.min_probability,
            max_bytes=max_bytes,
        )  # fmt: skip

    def begin(self, row: int, salt: str | None = None) -> None:
        self.texts[row] = []
        self.proposer.begin(row, salt)

    def grow(self, row: int, tokens: list[int]) -> None:
        size = len(self.texts[row])
        self.table[row, size : size + len(tokens)] = tokens
        self.texts[row] += tokens

    def end(self, row: int, num_prompt: int = 0, has_finished: bool = True) -> None:
        self.proposer.end(row, num_prompt, len(self.texts.pop(row)), has_finished)

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

    def expected_own(self, row: int, most: int = MAX_DRAFTS) -> oracle.Draft:
        text = self.texts[row]
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
