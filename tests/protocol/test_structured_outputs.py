"""Structured outputs: one kind, its sizes, and what errors say; for users and on the wire."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from nanocore.protocol.codec import InvalidSubmitError, encode, engine_decoder
from nanocore.protocol.errors import InvalidRequestError
from nanocore.protocol.fields import MAX_CHOICES, MAX_STRUCTURED_OUTPUTS_BYTES, MAX_STRUCTURES
from nanocore.protocol.messages import Submit
from nanocore.protocol.sampling import EngineSamplingParams, SamplingParams
from nanocore.protocol.structured_outputs import (
    KINDS,
    ReasoningMarks,
    StructuralTag,
    Structure,
    StructuredOutputs,
    StructuredOutputsParams,
)

SCHEMA = {"type": "object", "properties": {"größe": {"type": "integer"}}}
STRUCTURE = {"begin": "<f>", "schema": '{"type":"integer"}', "end": "</f>"}
TAG: dict[str, Any] = {"structures": [STRUCTURE], "triggers": ["<f"]}
ONE_OF_EACH: dict[str, Any] = {
    "json": '{"type":"object"}',
    "regex": "[ab]+",
    "choice": ["yes", "no"],
    "grammar": 'start: "a"',
    "json_object": True,
    "structural_tag": TAG,
}
LARGEST = MAX_STRUCTURED_OUTPUTS_BYTES


def submit(wanted: object) -> list[bytes]:
    """A SUBMIT as a client in any language would write it."""
    body = {"request_id": "r", "prompt_token_ids": b"", "sampling": {"structured_outputs": wanted}}
    return [b"\x10", msgspec.msgpack.encode(body)]


def decoded(wanted: object) -> StructuredOutputs:
    message = engine_decoder().decode(submit(wanted))
    assert isinstance(message, Submit)
    assert message.sampling is not None
    assert message.sampling.structured_outputs is not None
    return message.sampling.structured_outputs


def on_the_wire(wanted: dict[str, Any]) -> StructuredOutputs:
    """Built in Python, of what a body holds."""
    values = dict(wanted)
    if values.get("structural_tag") is not None:
        tag = values["structural_tag"]
        values["structural_tag"] = StructuralTag(
            structures=[Structure(**one) for one in tag["structures"]], triggers=tag["triggers"]
        )
    return StructuredOutputs(**values)


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_is_read_as_it_was_sent(kind: str) -> None:
    wanted = {kind: ONE_OF_EACH[kind]}
    assert decoded(wanted) == on_the_wire(wanted)
    assert decoded(wanted).kind == kind
    assert msgspec.to_builtins(decoded(wanted)) == wanted


def test_every_kind_is_a_field_of_both_structs() -> None:
    for struct in (StructuredOutputs, StructuredOutputsParams):
        assert struct.__struct_fields__ == (
            *KINDS, "disable_any_whitespace", "reasoning", "free_prefixes", "lenient",
        )  # fmt: skip


@pytest.mark.parametrize(
    ("wanted", "given"),
    [
        ({}, "none of them"),
        ({"json_object": False}, "none of them"),
        ({"disable_any_whitespace": True}, "none of them"),
        ({"json": "{}", "regex": ""}, "json and regex"),
        ({"json_object": True, "choice": ["a"]}, "choice and json_object"),
        (ONE_OF_EACH, " and ".join(KINDS)),
    ],
)
def test_exactly_one_kind_is_given(wanted: dict[str, Any], given: str) -> None:
    said = f"structured_outputs has {given}: give exactly one of {', '.join(KINDS)}"
    for build in (on_the_wire, lambda values: StructuredOutputsParams(**values), decoded):
        with pytest.raises(InvalidRequestError) as caught:
            build(wanted)
        assert said in str(caught.value)


LARGE: list[tuple[str, dict[str, Any], dict[str, Any]]] = [  # kind, the largest, one byte more
    ("json", {"json": "x" * LARGEST}, {"json": "x" * (LARGEST + 1)}),
    ("regex", {"regex": "ä" * (LARGEST // 2)}, {"regex": "ä" * (LARGEST // 2) + "x"}),
    ("grammar", {"grammar": "😀" * (LARGEST // 4)}, {"grammar": "x" + "😀" * (LARGEST // 4)}),
    ("choice", {"choice": ["x" * 34] * MAX_CHOICES},
     {"choice": ["x" * 34] * (MAX_CHOICES - 1) + ["x" * 35]}),
    ("structural_tag",
     {"structural_tag": {"structures": [STRUCTURE | {"schema": "x" * (LARGEST - 9)}],
                         "triggers": ["<f"]}},
     {"structural_tag": {"structures": [STRUCTURE | {"schema": "x" * (LARGEST - 9)}],
                         "triggers": ["<f>"]}}),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "largest", "larger"), LARGE, ids=[row[0] for row in LARGE])
def test_all_texts_together_have_a_size_in_bytes(
    kind: str, largest: dict[str, Any], larger: dict[str, Any]
) -> None:
    assert decoded(largest) == on_the_wire(largest)
    said = (
        f"structured_outputs.{kind} has {LARGEST + 1} bytes of UTF-8: at most {LARGEST} are allowed"
    )
    for build in (on_the_wire, decoded):
        with pytest.raises(InvalidRequestError) as caught:
            build(larger)
        assert said in str(caught.value)


def test_a_users_schema_is_measured_as_the_text_that_is_sent() -> None:
    empty = len(json.dumps({"const": ""}, separators=(",", ":")))
    StructuredOutputsParams(json={"const": "ä" * ((LARGEST - empty) // 2)})
    with pytest.raises(InvalidRequestError, match=rf"json has \d+ bytes .* at most {LARGEST}"):
        StructuredOutputsParams(json={"const": "ä" * ((LARGEST - empty) // 2 + 1)})


@pytest.mark.parametrize(
    ("wanted", "said"),
    [
        ({"choice": []}, "len(choice)=0 is out of range: at least 1 and at most 4096"),
        (
            {"choice": ["a"] * (MAX_CHOICES + 1)},
            "len(choice)=4097 is out of range: at least 1 and at most 4096",
        ),
        ({"choice": ["a", ""]}, "choice has an empty text: leave it out"),
        (
            {"structural_tag": TAG | {"structures": []}},
            "len(structures)=0 is out of range: at least 1 and at most 128",
        ),
        (
            {"structural_tag": TAG | {"structures": [STRUCTURE] * (MAX_STRUCTURES + 1)}},
            "len(structures)=129 is out of range",
        ),
        ({"structural_tag": TAG | {"triggers": []}}, "len(triggers)=0 is out of range"),
        (
            {"structural_tag": TAG | {"triggers": ["<f"] * (MAX_STRUCTURES + 1)}},
            "len(triggers)=129 is out of range",
        ),
        ({"structural_tag": TAG | {"triggers": ["<f", ""]}}, "an empty trigger: leave it out"),
        (
            {"structural_tag": TAG | {"triggers": ["<g", "<h"]}},
            "structural_tag.structures[0].begin='<f>' does not begin with one of the triggers "
            "['<g', '<h']: change it or add one",
        ),
    ],
)  # fmt: skip
def test_a_list_has_a_least_and_a_greatest_length_and_texts_that_are_texts(
    wanted: dict[str, Any], said: str
) -> None:
    for build in (on_the_wire, decoded):
        with pytest.raises(InvalidRequestError) as caught:
            build(wanted)
        assert said in str(caught.value)


def test_lists_may_be_as_long_as_that() -> None:
    assert len(decoded({"choice": ["a"] * MAX_CHOICES}).choice or ()) == MAX_CHOICES
    most = {"structures": [STRUCTURE] * MAX_STRUCTURES, "triggers": ["<f"] * MAX_STRUCTURES}
    assert decoded({"structural_tag": most}) == on_the_wire({"structural_tag": most})


@pytest.mark.parametrize("kind", ["json", "regex", "grammar"])
def test_what_an_empty_text_means_is_left_to_who_compiles_it(kind: str) -> None:
    assert decoded({kind: ""}).kind == kind


SURROGATE = "a\ud800"


@pytest.mark.parametrize(
    "wanted",
    [
        {"json": SURROGATE},
        {"regex": SURROGATE},
        {"choice": ["a", SURROGATE]},
        {"grammar": SURROGATE},
        {"structural_tag": TAG | {"triggers": ["<f", SURROGATE]}},
        {"structural_tag": TAG | {"structures": [STRUCTURE | {"end": SURROGATE}]}},
    ],
)
def test_a_text_that_is_no_unicode_is_refused_before_it_is_sent(wanted: dict[str, Any]) -> None:
    kind = next(iter(wanted))
    with pytest.raises(InvalidRequestError, match=f"{kind} is not valid Unicode: .*surrogates"):
        on_the_wire(wanted)


def test_a_users_schema_with_a_surrogate_is_refused_before_it_is_sent() -> None:
    for schema in ({"const": SURROGATE}, {SURROGATE: {}}):
        with pytest.raises(
            InvalidRequestError, match=r"structured_outputs.json is not valid Unicode"
        ):
            StructuredOutputsParams(json=schema)


def test_surrogates_in_a_body_are_no_message() -> None:
    [op, body] = submit({"regex": "xxx"})
    with pytest.raises(Exception, match="a str in the body is not UTF-8"):
        engine_decoder().decode([op, body.replace(b"xxx", b"\xed\xa0\x80")])


@pytest.mark.parametrize(
    ("wanted", "said"),
    [
        ({"jsn": "{}"}, "`jsn` - at `$.sampling.structured_outputs` - did you mean `json`?"),
        ({"choices": ["a"]}, "- did you mean `choice`?"),
        ({"regexp": "a"}, "- did you mean `regex`?"),
        ({"structural_tags": TAG}, "- did you mean `structural_tag`?"),
        ({"structures": []}, "- it belongs into `structural_tag`"),
        ({"backend": "auto"}, "the unknown field `backend` - at `$.sampling.structured_outputs`"),
        ({"structural_tag": TAG | {"trigger": []}}, "- did you mean `triggers`?"),
        (
            {"structural_tag": TAG | {"structures": [STRUCTURE | {"schemas": ""}]}},
            "structures[0]` - did you mean `schema`?",
        ),
    ],
)
def test_an_unknown_field_names_the_nearest(wanted: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidSubmitError) as caught:
        decoded(wanted)
    assert str(caught.value).endswith(said)


def test_a_kind_beside_the_other_parameters_belongs_into_structured_outputs() -> None:
    body = {"request_id": "r", "prompt_token_ids": b"", "sampling": {"regex": "a"}}
    with pytest.raises(InvalidSubmitError, match="it belongs into `structured_outputs`"):
        engine_decoder().decode([b"\x10", msgspec.msgpack.encode(body)])


@pytest.mark.parametrize(
    ("wanted", "said"),
    [
        ({"json": {"type": "object"}}, "got `map` - at `$.sampling.structured_outputs.json`"),
        ({"regex": 1}, "structured_outputs.regex`"),
        ({"choice": "yes"}, "structured_outputs.choice`"),
        ({"choice": ["yes", 1]}, "structured_outputs.choice[1]`"),
        ({"json_object": 1}, "structured_outputs.json_object`"),
        ({"structural_tag": "{}"}, "structured_outputs.structural_tag`"),
        ({"structural_tag": {"triggers": ["a"]}}, "lacks the required field `structures`"),
        ([], "structured_outputs`"),
    ],
)
def test_decoding_wants_the_types_of_the_wire(wanted: object, said: str) -> None:
    with pytest.raises(InvalidSubmitError) as caught:
        decoded(wanted)
    assert said in str(caught.value)
    assert caught.value.request_id == "r"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("json", 5), ("json", [1]), ("json", {1: 2}), ("regex", 5), ("regex", b"a"),
        ("choice", "yes"), ("choice", ["yes", 1]), ("grammar", ["a"]), ("json_object", 1),
        ("structural_tag", 5), ("disable_any_whitespace", "no"),
    ],
)  # fmt: skip
def test_a_users_value_of_the_wrong_type_is_refused_by_name(name: str, value: Any) -> None:
    said = rf"^structured_outputs\.{name}(=.*wrong type|(\[\d\])? must be .*, not )"
    with pytest.raises(InvalidRequestError, match=said):
        StructuredOutputsParams(**{name: value})


@pytest.mark.parametrize(
    ("tag", "key"),
    [("{}", "structures"), ({"structures": [{"begin": "<f>"}], "triggers": ["<"]}, "schema")],
)
def test_a_structural_tag_says_which_key_is_missing(tag: Any, key: str) -> None:
    with pytest.raises(InvalidRequestError, match=f": the key '{key}' is missing$"):
        StructuredOutputsParams(structural_tag=tag).for_engine()


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        (SCHEMA, '{"type":"object","properties":{"größe":{"type":"integer"}}}'),
        (True, "true"),
        (False, "false"),
        ('{ "type" : "object" }', '{ "type" : "object" }'),
    ],
)
def test_a_users_schema_becomes_json_text_in_the_order_it_was_written(
    schema: Any, text: str
) -> None:
    params = StructuredOutputsParams(json=schema, disable_any_whitespace=True)
    assert params.for_engine().kind == "json"
    assert params.for_engine() == StructuredOutputs(json=text, disable_any_whitespace=True)


@pytest.mark.parametrize(
    "marks", [{"begin": 5, "end": "a"}, {"end": 5}, {"begin": None, "end": "a"}, {"end": ""}]
)
def test_marks_of_reasoning_are_texts(marks: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError, match=r"structured_outputs\.reasoning\."):
        ReasoningMarks(**marks)
    with pytest.raises(InvalidRequestError, match=r"structured_outputs\.reasoning"):
        StructuredOutputsParams(regex="a", reasoning=marks)  # type: ignore[arg-type]


def test_marks_may_be_given_as_a_dict() -> None:
    params = StructuredOutputsParams(regex="a", reasoning={"end": "x"})  # type: ignore[arg-type]
    assert params.for_engine().reasoning == ReasoningMarks(end="x")


def test_what_cannot_be_json_is_refused_by_name() -> None:
    endless: dict[str, Any] = {}
    endless["items"] = endless
    for schema in ({"const": float("nan")}, {"const": {1, 2}}, endless):
        with pytest.raises(InvalidRequestError, match=r"structured_outputs\.json is not JSON: "):
            StructuredOutputsParams(json=schema)


def test_a_users_structural_tag_has_schemas_as_objects_or_texts() -> None:
    for schema in ({"type": "integer"}, STRUCTURE["schema"]):
        tag = TAG | {"structures": [STRUCTURE | {"schema": schema}]}
        for value in (tag, json.dumps(tag)):
            params = StructuredOutputsParams(structural_tag=value)
            assert params.for_engine() == on_the_wire({"structural_tag": TAG})


@pytest.mark.parametrize(
    "tag",
    [
        "{", "[]", "5", {}, {"structures": [{}], "triggers": ["<f"]}, {"structures": [STRUCTURE]},
        {"structures": 1, "triggers": ["<f"]}, {"structures": ["a"], "triggers": ["<f"]},
        TAG | {"at_least_one": True}, {"structures": [STRUCTURE], "triggers": [1]},
    ],
    ids=str,
)  # fmt: skip
def test_a_structural_tag_of_another_form_is_refused_with_the_right_one(tag: Any) -> None:
    with pytest.raises(InvalidRequestError, match=r"must be \{'structures': \[\{'begin': str"):
        StructuredOutputsParams(structural_tag=tag)


def test_a_request_carries_what_the_user_wanted() -> None:
    params = SamplingParams(structured_outputs=StructuredOutputsParams(json=SCHEMA), n=2)
    sent = Submit(request_id="r", prompt_token_ids=b"\1\0\0\0", sampling=params.for_engine())
    message = engine_decoder().decode(encode(sent))
    assert message == sent
    assert isinstance(message, Submit)
    assert message.sampling is not None
    wanted = message.sampling.structured_outputs
    assert wanted is not None
    assert json.loads(wanted.json or "") == SCHEMA


def test_a_request_without_any_is_encoded_as_before() -> None:
    assert (
        b"structured"
        not in encode(
            Submit(request_id="r", prompt_token_ids=b"", sampling=SamplingParams().for_engine())
        )[1]
    )
    assert EngineSamplingParams().structured_outputs is None


def test_a_dict_in_place_of_the_params_is_refused_with_the_remedy() -> None:
    with pytest.raises(InvalidRequestError, match=r"write StructuredOutputsParams\(json=\.\.\.\)"):
        SamplingParams(structured_outputs={"json": SCHEMA})  # type: ignore[arg-type]


def test_a_structural_tag_may_say_that_it_is_one() -> None:
    structure = {"begin": "<a>", "schema": {"type": "integer"}, "end": "</a>"}
    tag = {"structures": [structure], "triggers": ["<a>"]}
    plain, typed = (
        StructuredOutputsParams(structural_tag=one).for_engine()
        for one in (tag, tag | {"type": "structural_tag"})
    )
    assert plain == typed
