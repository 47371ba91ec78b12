"""Sampling parameters: every bound, on construction and again on decoding."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest

from nanocore.protocol.codec import InvalidSubmitError, engine_decoder
from nanocore.protocol.errors import InvalidRequestError
from nanocore.protocol.sampling import (
    EngineSamplingParams,
    RepetitionDetectionParams,
    SamplingParams,
)
from nanocore.protocol.structured_outputs import StructuredOutputs, StructuredOutputsParams

REFUSED: list[tuple[str, Any, str]] = [  # field, value, limit as the message puts it
    ("temperature", -1.0, "at least 0"),
    ("temperature", -1e-9, "at least 0"),
    ("temperature", math.nan, "finite"),
    ("temperature", math.inf, "finite"),
    ("temperature", -math.inf, "finite"),
    ("top_p", 0.0, "(0, 1]"),
    ("top_p", -0.5, "(0, 1]"),
    ("top_p", 1.1, "(0, 1]"),
    ("top_p", math.nan, "(0, 1]"),
    ("top_k", -2, "-1 for all"),
    ("min_p", 2.0, "[0, 1]"),
    ("min_p", -0.1, "[0, 1]"),
    ("min_p", math.nan, "[0, 1]"),
    ("seed", -1, "[0, 9007199254740991]"),
    ("seed", 2**53, "[0, 9007199254740991]"),
    ("max_tokens", 0, "[1, 2147483647]"),
    ("max_tokens", -5, "[1, 2147483647]"),
]


def _fields(name: str, value: object) -> dict[str, Any]:
    return {name: value}


def _submit(sampling: dict[str, Any]) -> list[bytes]:
    body = {"request_id": "r", "prompt_token_ids": b"", "sampling": sampling}
    return [b"\x10", msgspec.msgpack.encode(body)]


@pytest.mark.parametrize(("field", "value", "limit"), REFUSED)
def test_a_refusal_names_field_value_and_limit(field: str, value: object, limit: str) -> None:
    for kind in (EngineSamplingParams, SamplingParams):
        with pytest.raises(InvalidRequestError) as caught:
            kind(**_fields(field, value))
        assert f"{field}={value!r}" in str(caught.value)
        assert limit in str(caught.value)
    with pytest.raises(InvalidSubmitError) as refused:
        engine_decoder().decode(_submit({field: value}))
    assert str(caught.value) in str(refused.value)
    assert refused.value.request_id == "r"


@pytest.mark.parametrize("field", ["top_k", "max_tokens"])
def test_a_value_above_int32_is_refused_with_that_limit(field: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"{field}=2147483648") as caught:
        EngineSamplingParams(**_fields(field, 2**31))
    limits = ("2147483647", "2**31")
    assert any(limit in str(caught.value).partition(":")[2] for limit in limits)


def test_too_many_stop_strings_are_refused_by_count() -> None:
    assert SamplingParams(stop=["x"] * 16).stop_strings == ["x"] * 16
    with pytest.raises(InvalidRequestError, match=r"len\(stop\)=17 .* at most 16"):
        SamplingParams(stop=["x"] * 17)


@pytest.mark.parametrize("stop", ["", ["ok", ""], "x" * 257, ["ok", "x" * 257]])
def test_an_empty_or_very_long_stop_string_is_refused(stop: str | list[str]) -> None:
    with pytest.raises(InvalidRequestError, match=r"stop='.* 1 to 256 characters"):
        SamplingParams(stop=stop)


def test_a_stop_string_of_the_greatest_length_is_accepted() -> None:
    assert SamplingParams(stop="x" * 256).stop_strings == ["x" * 256]


def test_stop_strings_without_text_are_refused_with_the_remedy() -> None:
    with pytest.raises(InvalidRequestError, match="detokenize=True"):
        SamplingParams(stop="x", detokenize=False)
    assert SamplingParams(detokenize=False).stop_strings == []


def test_one_stop_string_is_a_list_of_one() -> None:
    assert SamplingParams(stop="END").stop_strings == ["END"]


def test_what_is_sent_has_no_client_only_field() -> None:
    params = SamplingParams(
        temperature=0.5,
        seed=3,
        stop="x",
        include_stop_str_in_output=True,
        skip_special_tokens=False,
    )
    sent = params.for_engine()
    assert type(sent) is EngineSamplingParams
    assert msgspec.to_builtins(sent) == {"temperature": 0.5, "seed": 3}


@pytest.mark.parametrize(
    "field",
    ["stop", "detokenize", "skip_special_tokens", "include_stop_str_in_output", "bad_words"],
)
def test_a_field_that_no_engine_knows_is_refused_by_name(field: str) -> None:
    with pytest.raises(InvalidSubmitError, match=f"`{field}`"):
        engine_decoder().decode(_submit({field: None}))


def test_parameters_do_not_share_their_lists() -> None:
    first, second = SamplingParams(), SamplingParams()
    assert first.stop_token_ids is not second.stop_token_ids


@pytest.mark.parametrize(("temperature", "greedy"), [(0.0, True), (9e-6, True), (1e-5, False)])
def test_a_temperature_near_zero_is_greedy(temperature: float, greedy: bool) -> None:
    assert EngineSamplingParams(temperature=temperature).greedy is greedy


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_tokens", "3"), ("max_tokens", True), ("max_tokens", 1.0), ("temperature", "x"),
        ("temperature", None), ("top_k", 1.5), ("top_p", [0.5]), ("seed", "7"), ("ignore_eos", 1),
        ("stop", [3]), ("stop", b"x"), ("stop", {"a": 1}), ("stop_token_ids", "12"),
        ("stop_token_ids", [1.5]), ("detokenize", "yes"),
    ],
)  # fmt: skip
def test_a_value_of_the_wrong_type_is_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(InvalidRequestError, match=rf"^{name}(\[\d\])? must be .*, not "):
        SamplingParams(**{name: value})  # type: ignore[arg-type]


def test_an_int_is_taken_for_a_float() -> None:
    assert SamplingParams(temperature=1, top_p=1, min_p=0).temperature == 1.0


@pytest.mark.parametrize("pooling", ["last", "mean"])
@pytest.mark.parametrize("more", [{}, {"max_tokens": 1}, {"skip_reading_prefix_cache": True}])
def test_an_embedding_is_asked_for_alone(pooling: str, more: dict[str, Any]) -> None:
    params = SamplingParams(pooling=pooling, detokenize=False, **more)
    assert params.for_engine() == EngineSamplingParams(pooling=pooling, **more)


BESIDE_POOLING: dict[str, Any] = {
    "temperature": 0.0, "top_p": 0.5, "top_k": 1, "min_p": 0.5, "seed": 0, "max_tokens": 2,
    "stop_token_ids": [1], "ignore_eos": True, "n": 2, "min_tokens": 1, "presence_penalty": 1.0,
    "frequency_penalty": 1.0, "repetition_penalty": 2.0, "allowed_token_ids": [1], "logprobs": 0,
    "prompt_logprobs": 0, "logit_bias": [(1, 1.0)], "bad_words_token_ids": [[1]],
    "structured_outputs": StructuredOutputs(json_object=True),
    "repetition_detection": RepetitionDetectionParams(max_pattern_size=2, min_count=2),
}  # fmt: skip
USERS: dict[str, Any] = {
    "logit_bias": {1: 1.0}, "bad_words": ["a"], "stop": "x",
    "structured_outputs": StructuredOutputsParams(json_object=True),
}  # fmt: skip


def test_whatever_says_how_to_sample_is_refused_beside_an_embedding_by_name() -> None:
    allowed = {"pooling", "skip_reading_prefix_cache"}
    assert BESIDE_POOLING.keys() | allowed == {*EngineSamplingParams.__struct_fields__}
    for params, values in ((EngineSamplingParams, BESIDE_POOLING), (SamplingParams, USERS)):
        for name, value in values.items():
            with pytest.raises(InvalidRequestError, match=f"pooling='mean' with {name}=") as caught:
                params(pooling="mean", **({"max_tokens": 1} | {name: value}))
            assert "leave" in str(caught.value)


def test_a_pooling_that_is_none_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(InvalidRequestError, match="'cls' is unknown: it must be 'last' or 'mean'"):
        EngineSamplingParams(pooling="cls")
    with pytest.raises(InvalidRequestError, match="pooling must be a string, not 1"):
        SamplingParams(pooling=1)  # type: ignore[arg-type]


def test_a_dict_is_taken_for_repetition_detection_params() -> None:
    given = {"max_pattern_size": 8, "min_count": 3}
    expected = RepetitionDetectionParams(max_pattern_size=8, min_pattern_size=0, min_count=3)
    params = SamplingParams(repetition_detection=given)  # type: ignore[arg-type]
    assert params.repetition_detection == params.for_engine().repetition_detection == expected


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"max_pattern_size": 0, "min_count": 2}, "max_pattern_size=0 .* leave"),
        ({"max_pattern_size": 1025, "min_count": 2}, r"max_pattern_size=1025 .*\[1, 1024\]"),
        ({"max_pattern_size": 8, "min_count": 1}, "min_count=1 .* from 2 on"),
        ({"max_pattern_size": 2, "min_pattern_size": 3, "min_count": 2}, "max_pattern_size, which"),
        ({"max_pattern_size": "8", "min_count": 2}, "repetition_detection.max_pattern_size must"),
        ({"min_count": 2}, "max_pattern_size"),
        ({"max_pattern_size": 8}, "min_count"),
        ({"max_pattern_size": 8, "min_count": 2, "mode": 1}, "mode"),
    ],
)
def test_repetition_detection_is_refused_with_what_is_wrong(
    given: dict[str, Any], words: str
) -> None:
    with pytest.raises(InvalidRequestError, match=words):
        SamplingParams(repetition_detection=given)  # type: ignore[arg-type]
