"""What clients may give as prompts, and how they are told what not."""

from __future__ import annotations

from typing import Any

import pytest

from nanocore.http.dialects.prompts import MAX_PROMPTS, check_truncation, read_prompts, truncated
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


def test_the_last_tokens_are_kept() -> None:
    prompts = [[1, 2, 3], [4]]
    assert truncated(prompts, None, 1) == prompts
    assert truncated(prompts, 2, 1) == [[2, 3], [4]]
    assert truncated(prompts, -1, 1) == [[3], [4]]
    assert truncated(prompts, -1, -5) == [[3], [4]]


@pytest.mark.parametrize("num_tokens", [0, -2])
def test_a_truncation_to_nothing_is_refused(num_tokens: int) -> None:
    with pytest.raises(HttpError, match="truncate_prompt_tokens"):
        check_truncation(num_tokens)
