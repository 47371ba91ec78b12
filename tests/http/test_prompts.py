"""What clients may give as prompts, and how they are told what not."""

from __future__ import annotations

from typing import Any

import pytest

from nanocore.http.dialects.prompts import MAX_PROMPTS, num_kept_tokens, read_prompts
from nanocore.http.errors import HttpError


@pytest.mark.parametrize(
    ("given", "prompts"),
    [
        ("a", ["a"]),
        ("", [""]),
        (["a", ""], ["a", ""]),
        ([1, 2], [[1, 2]]),
        ([[1, 2], [3]], [[1, 2], [3]]),
    ],
)
def test_a_prompt_or_several_as_text_or_token_ids(given: Any, prompts: Any) -> None:
    assert read_prompts(given, "prompt") == prompts


@pytest.mark.parametrize("given", [[], ["a", 1], [1, [2]], ["a", [2]], ["a"] * (MAX_PROMPTS + 1)])
def test_what_is_none_of_these_is_refused(given: Any) -> None:
    with pytest.raises(HttpError) as raised:
        read_prompts(given, "input")
    assert raised.value.status == 400
    assert raised.value.param == "input"


def test_so_many_of_the_last_tokens_are_kept() -> None:
    asked = [(None, 1), (2, 1), (-1, 3), (-1, -5)]
    assert [num_kept_tokens(*each) for each in asked] == [None, 2, 3, 1]


@pytest.mark.parametrize("num_tokens", [0, -2])
def test_a_truncation_to_nothing_is_refused(num_tokens: int) -> None:
    with pytest.raises(HttpError, match="truncate_prompt_tokens"):
        num_kept_tokens(num_tokens, 1)
