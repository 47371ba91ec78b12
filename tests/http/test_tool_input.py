"""A call's arguments, whole and in pieces: an object passes, and nothing else does as it is."""

from __future__ import annotations

import json

import msgspec
import pytest

from nanocore.http.dialects.tool_input import StreamedInput, tool_input

OBJECTS = [
    "{}",
    '{"a": 1}',
    ' \n{"a": "\u00e9}", "b": [1.0, 123456789012345678901234567890]}\n',
    '{"a": {"b": "\\u00e9\\n"}}',
]
OTHERS = ["[1]", "null", '"{}"', "5", "echo hi", "\u00e9", ' "', "]"]


def whole(arguments: str) -> str:
    return msgspec.json.encode(tool_input(arguments)).decode()


def streamed(*deltas: str) -> str:
    stream = StreamedInput()
    return "".join([*(stream.feed(delta) for delta in deltas), stream.finish()])


@pytest.mark.parametrize("arguments", OBJECTS)
def test_an_object_is_as_the_model_wrote_it(arguments: str) -> None:
    assert whole(arguments) == arguments.strip()
    assert streamed(arguments) == streamed(*arguments) == arguments


@pytest.mark.parametrize("arguments", OTHERS)
def test_what_is_no_object_is_put_into_one(arguments: str) -> None:
    wanted = {"INVALID_JSON": arguments}
    assert json.loads(whole(arguments)) == wanted
    assert json.loads(streamed(arguments)) == json.loads(streamed(*arguments)) == wanted


@pytest.mark.parametrize("arguments", ['{"a": ', '{"a" 1}', '{"a": NaN}', "[" * 100_000])
def test_what_is_no_json_is_put_into_an_object_when_all_of_it_is_there(arguments: str) -> None:
    assert json.loads(whole(arguments)) == {"INVALID_JSON": arguments}


def test_an_object_that_is_cut_off_has_been_streamed_up_to_there() -> None:
    assert streamed('{"a"', ": ") == '{"a": '


@pytest.mark.parametrize("arguments", ["", " ", "\n\t"])
def test_no_arguments_are_an_empty_object(arguments: str) -> None:
    assert whole(arguments) == "{}"
    assert streamed(arguments) == ""  # clients take that for one


def test_an_object_is_shown_as_soon_as_it_has_begun() -> None:
    stream = StreamedInput()
    assert [stream.feed(delta) for delta in (" ", "\n", '{"', "a")] == ["", "", ' \n{"', "a"]
