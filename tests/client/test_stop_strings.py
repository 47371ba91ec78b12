"""Stop strings: found wherever the text is cut, and nothing shown that belongs to one."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanocore.client.detokenizer import StopStringMatcher
from tests.campaign import examples

PROPERTY = settings(max_examples=examples(100), deadline=None, derandomize=True)


def _feed(stops: list[str], pieces: list[str], include: bool = False) -> tuple[str, str | None]:
    """(all text shown, stop string found) after feeding the pieces until a stop or the end."""
    matcher = StopStringMatcher(stops, include)
    shown = ""
    for piece in pieces:
        text, stop = matcher.push(piece)
        shown += text
        if stop is not None:
            return shown, stop
    return shown + matcher.flush(), None


def _search(stops: list[str], text: str, include: bool) -> tuple[str, str | None]:
    """The specification: the first end of a stop string, and of those the first in the list."""
    for end in range(len(text) + 1):
        for stop in stops:
            if text[:end].endswith(stop):
                return text[: end if include else end - len(stop)], stop
    return text, None


def test_what_may_begin_a_stop_string_is_held_back_and_no_more() -> None:
    matcher = StopStringMatcher(["END"], False)
    assert matcher.push("xE") == ("x", None)
    assert matcher.push("N") == ("", None)
    assert matcher.push("x") == ("ENx", None)

    matcher = StopStringMatcher(["aab", "b!"], False)
    assert matcher.push("aaaa") == ("aa", None)
    assert matcher.push("x") == ("aax", None)

    matcher = StopStringMatcher(["END"], False)
    assert matcher.push("the EN") == ("the ", None)
    assert matcher.flush() == "EN"
    assert matcher.flush() == ""

    matcher = StopStringMatcher(["abcd", "b"], False)
    assert matcher.push("ab", is_sought=False) == ("", None)
    assert matcher.push("cx") == ("abcx", None)


@pytest.mark.parametrize(
    ("pieces", "expected"),
    [
        (["xEND", "y"], ("xENDy", None)),  # ended before
        (["xEN", "Dy"], ("x", "END")),  # began before
        (["xENDEND", "END"], ("xENDEND", "END")),
    ],
)
def test_a_stop_string_that_ends_where_none_is_sought_is_not_found_later(
    pieces: list[str], expected: tuple[str, str | None]
) -> None:
    matcher = StopStringMatcher(["END"], False)
    exempt, stop = matcher.push(pieces[0], is_sought=False)
    assert stop is None
    text, stop = matcher.push(pieces[1])
    assert (exempt + text + matcher.flush(), stop) == expected


@PROPERTY
@given(
    text=st.text("ab", max_size=12),
    stops=st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3),
    cuts=st.sets(st.integers(0, 12)),
    include=st.booleans(),
)
def test_the_result_does_not_depend_on_how_the_text_is_cut(
    text: str, stops: list[str], cuts: set[int], include: bool
) -> None:
    edges = [0, *sorted(cut for cut in cuts if cut < len(text)), len(text)]
    pieces = [text[start:end] for start, end in itertools.pairwise(edges)]
    assert _feed(stops, pieces, include) == _search(stops, text, include)
