"""Errors of types, in words that name the field and what it holds."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
import pytest

from nanocore.protocol.fields import field_error


class Part(msgspec.Struct):
    role: str
    weight: float = 0.0


class Body(msgspec.Struct):
    messages: list[Part]
    max_tokens: int | None = None
    stop: str | list[str] | None = None
    choice: Literal["auto", "none"] | dict[str, Any] | None = None
    bias: dict[str, float] = {}
    count: int = 0
    is_on: bool = False
    pair: tuple[int, int] = (0, 0)
    share: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    rank: Annotated[int, msgspec.Meta(le=8)] = 0


@pytest.mark.parametrize(
    ("fields", "path", "text"),
    [
        ({"max_tokens": "x"}, "max_tokens", "max_tokens must be an integer, not 'x'"),
        ({"count": 1.5}, "count", "count must be an integer, not 1.5"),
        ({"stop": 5}, "stop", "stop must be a string or a list, not 5"),
        ({"stop": ["a", 5]}, "stop[1]", "stop[1] must be a string, not 5"),
        ({"is_on": "yes"}, "is_on", "is_on must be true or false, not 'yes'"),
        ({"choice": "must"}, "choice", "choice must be one of auto, none, not 'must'"),
        ({"choice": 5}, "choice", "choice must be a string or an object, not 5"),
        ({"messages": "x"}, "messages", "messages must be a list, not 'x'"),
        ({"messages": [5]}, "messages[0]", "messages[0] must be an object, not 5"),
        ({"messages": [{}]}, "messages[0].role", "messages[0].role is missing"),
        (
            {"messages": [{"role": "a"}, {"role": "b", "weight": []}]},
            "messages[1].weight",
            "messages[1].weight must be a number, not []",
        ),
        ({"bias": {"7": "b"}}, "bias[...]", "bias[...] must be a number"),
        ({"share": -0.5}, "share", "share must be a number >= 0.0, not -0.5"),
        ({"rank": 9}, "rank", "rank must be an integer <= 8, not 9"),
        ({"pair": [1]}, "pair", "Expected `array` of length 2, got 1 - at `$.pair`"),
    ],
)
def test_an_error_names_the_field_and_its_value(
    fields: dict[str, Any], path: str, text: str
) -> None:
    body = {"messages": []} | fields
    with pytest.raises(msgspec.ValidationError) as caught:
        msgspec.convert(body, Body)
    assert field_error(caught.value, body, Body) == (path, text)


def test_what_is_missing_or_of_no_field_is_told() -> None:
    for body, expected in (
        ({}, ("messages", "messages is missing")),
        ([], (None, "Expected `object`, got `array`")),
    ):
        with pytest.raises(msgspec.ValidationError) as caught:
            msgspec.convert(body, Body)
        assert field_error(caught.value, body, Body) == expected
