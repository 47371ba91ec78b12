"""Answers that are held to a form, through HTTP: response formats and forced calls."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx2 as httpx
import jsonschema
import pytest

from tests.http import asgi
from tests.http.asgi import app_of

QUESTION = [{"role": "user", "content": "12 + 34 = ?"}]
HELD: dict[str, Any] = {
    "type": "object",
    "properties": {"tag": {"type": "string", "maxLength": 3}, "n": {"enum": [1, 2]}},
    "required": ["tag", "n"],
    "additionalProperties": False,
}
RECORD = {
    **HELD,
    "properties": {**HELD["properties"], "tag": {"maxLength": 3, "pattern": "^(?!a)b$",
                                                 "type": "string"}},
    "propertyNames": {"type": "string"},
}  # fmt: skip
IDENTIFIED = {
    "$id": "https://example.org/t.json",
    "type": "object",
    "properties": {
        "p": {"$ref": "#/$defs/P"},
        "q": {"$ref": "https://example.org/t.json#/$defs/P"},
    },
    "required": ["p", "q"],
    "additionalProperties": False,
    "$defs": {"P": {"type": "integer", "minimum": 0, "maximum": 99}},
}
BY_NAME: Any = {"type": "function", "function": {"name": "f"}}


def ask(endpoint: str, path: str = "/v1/chat/completions", **body: Any) -> httpx.Response:
    asked = {"messages": QUESTION, "temperature": 0, "max_tokens": 100, **body}
    return asgi.ask(endpoint, path, asked, tool_parser="hermes")


def function(name: str, parameters: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters, **more}}


def arguments(answer: httpx.Response) -> list[Any]:
    assert answer.status_code == 200, answer.text
    calls = answer.json()["choices"][0]["message"]["tool_calls"]
    return [json.loads(call["function"]["arguments"]) for call in calls]


@pytest.mark.parametrize("choice", ["required", BY_NAME])
def test_a_forced_call_of_a_tool_that_is_not_strict_is_held_as_far_as_it_can_be(
    demo_endpoint: str, choice: Any
) -> None:
    asked = {"tools": [function("f", RECORD)], "tool_choice": choice}
    answer = ask(demo_endpoint, **asked)
    for one in arguments(answer):
        jsonschema.validate(one, HELD)
    not_held = "tools[f].parameters/properties/tag/pattern, tools[f].parameters/propertyNames"
    assert answer.headers["nanocore-ignored"] == not_held
    assert ask(demo_endpoint, **asked, stream=True).headers["nanocore-ignored"] == not_held
    strict = ask(demo_endpoint, tools=[function("f", RECORD, strict=True)], tool_choice=choice)
    error = strict.json()["error"]
    assert (strict.status_code, "propertyNames" in error["message"]) == (400, True)
    assert error["message"].startswith("tools[f].parameters at '")
    assert error["param"].startswith("tools")


def test_one_tool_that_the_grammar_cannot_hold_leaves_the_others_as_they_are(
    demo_endpoint: str,
) -> None:
    tools = [function("f", RECORD), function("g", HELD, strict=True), function("h", HELD)]
    answer = ask(demo_endpoint, tools=tools, tool_choice="required")
    assert arguments(answer)
    assert answer.headers["nanocore-ignored"].count("tools[f].parameters/") == 2


@pytest.mark.parametrize("choice", ["required", BY_NAME])
def test_schemas_that_name_themselves_keep_their_references(
    demo_endpoint: str, choice: Any
) -> None:
    tools = [function("f", IDENTIFIED), function("g", IDENTIFIED)]
    answer = ask(demo_endpoint, tools=tools, tool_choice=choice)
    assert "nanocore-ignored" not in answer.headers
    for one in arguments(answer):
        jsonschema.validate(one, IDENTIFIED)


@pytest.mark.parametrize(
    "response_format",
    [
        {"type": "json_schema", "json_schema": {"name": "r", "schema": RECORD}},
        {"type": "json_schema", "json_schema": {"schema": RECORD, "strict": False}},
        {"type": "json_object", "schema": RECORD},
    ],
)
def test_a_response_format_that_is_not_strict_is_held_as_far_as_it_can_be(
    demo_endpoint: str, response_format: dict[str, Any]
) -> None:
    answer = ask(demo_endpoint, response_format=response_format)
    assert answer.status_code == 200, answer.text
    jsonschema.validate(json.loads(answer.json()["choices"][0]["message"]["content"]), HELD)
    name = f"response_format{'.json_schema' * ('json_schema' in response_format)}.schema"
    assert answer.headers["nanocore-ignored"] == (
        f"{name}/properties/tag/pattern, {name}/propertyNames"
    )


def test_a_strict_response_format_that_the_grammar_lacks_is_refused(demo_endpoint: str) -> None:
    strict = {"type": "json_schema", "json_schema": {"schema": RECORD, "strict": True}}
    error = ask(demo_endpoint, response_format=strict).json()["error"]
    assert error["message"].startswith("response_format.json_schema.schema at '")
    assert error["param"] == "response_format.json_schema.schema"
    odd = ask(demo_endpoint, response_format={"type": "json_object", "schema": "object"})
    assert odd.status_code == 400


@pytest.mark.parametrize(
    ("limits", "names"),
    [
        ({"structured_outputs": {"choice": ["ab"]}, "min_tokens": 20},
         "structured_outputs, min_tokens"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"const": 1}}},
          "min_tokens": 20},
         "response_format.json_schema.schema, min_tokens"),
        ({"structured_outputs": {"choice": ["a"]}, "allowed_token_ids": [5]},
         "structured_outputs, allowed_token_ids"),
    ],
)  # fmt: skip
def test_a_request_whose_own_limits_leave_no_token_is_a_bad_one(
    demo_endpoint: str, limits: dict[str, Any], names: str
) -> None:
    answer = ask(demo_endpoint, **limits)
    assert answer.status_code == 400, answer.text
    message = answer.json()["error"]["message"]
    assert "no token is left to choose" in message
    assert f": {names} of this request" in message


def many(number: int, **schema: Any) -> list[dict[str, Any]]:
    """Tools with the longest names, whose schemas are all different."""
    return [
        function(f"t{i}_".ljust(128, "n"), {"properties": {f"p{i}": HELD}, **schema})
        for i in range(number)
    ]


@pytest.mark.parametrize(("number", "is_held"), [(200, True), (1024, False)])
def test_one_of_as_many_tools_as_are_allowed_must_be_called(
    demo_endpoint: str, number: int, is_held: bool
) -> None:
    tools = [function(tool["function"]["name"], {}) for tool in many(number)]
    tools = many(number) if not is_held else tools
    answer = ask(demo_endpoint, tools=tools, tool_choice="required", max_tokens=400)
    assert answer.status_code == 200, answer.text
    names = {tool["function"]["name"] for tool in tools}
    calls = answer.json()["choices"][0]["message"]["tool_calls"]
    assert {call["function"]["name"] for call in calls} <= names
    ignored = answer.headers.get("nanocore-ignored")
    assert ignored == (None if is_held else "tools[*].parameters")


def test_strict_tools_whose_schemas_are_too_large_are_refused_by_their_name(
    demo_endpoint: str,
) -> None:
    tools = [function("f", {"properties": {"a" * 2**18: {}}}, strict=True)]
    for choice, name in (("required", "tools: the schema of all calls"), (BY_NAME, "tools[f].")):
        error = ask(demo_endpoint, tools=tools, tool_choice=choice).json()["error"]
        assert error["message"].startswith(name)
        assert error["param"].startswith("tools")


def test_tools_that_are_too_complex_together_are_refused_by_their_name(demo_endpoint: str) -> None:
    tools = [function(f"t{i}".rjust(128, "n"), {"properties": {f"p{i}": HELD}}) for i in range(200)]
    error = ask(demo_endpoint, tools=tools, tool_choice="required").json()["error"]
    assert error["message"].startswith("tools: the schema of all calls is too complex")
    assert error["param"] == "tools"


def test_more_strict_tools_than_a_structural_tag_has_structures_may_be_called(
    demo_endpoint: str,
) -> None:
    tools = [function(f"t{i}", HELD, strict=True) for i in range(200)]
    answer = ask(demo_endpoint, tools=tools, max_tokens=5)
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize(
    ("path", "body", "name"),
    [
        ("/v1/completions", {"prompt": "x", "response_format": {
            "type": "json_schema", "json_schema": {"schema": RECORD, "strict": True}}},
         "response_format.json_schema.schema"),
        ("/v1/responses", {"input": "x", "text": {"format": {
            "type": "json_schema", "name": "r", "schema": RECORD, "strict": True}}},
         "text.format.schema"),
        ("/v1/messages", {"output_config": {"format": {"type": "json_schema", "schema": RECORD}}},
         "output_config.format.schema"),
        ("/v1/messages", {"output_format": {"type": "json_schema", "schema": RECORD}},
         "output_format.schema"),
        ("/v1/messages", {"tool_choice": {"type": "any"}, "tools": [
            {"name": "f", "input_schema": RECORD, "strict": True}]}, "tools[f].input_schema"),
    ],
)  # fmt: skip
def test_a_schema_that_is_refused_is_called_what_the_dialect_calls_it(
    demo_endpoint: str, path: str, body: dict[str, Any], name: str
) -> None:
    answer = ask(demo_endpoint, path, **body)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith(f"{name} at '/")


def test_a_json_object_is_an_object_whatever_its_schema_lacks(demo_endpoint: str) -> None:
    for schema in ({}, True, {"type": ["object", "null"]}):
        answer = ask(
            demo_endpoint,
            response_format={"type": "json_object", "schema": schema},
            max_tokens=20,
        )
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"][0]["message"]["content"][:1] == "{"
    for schema in ({"type": "integer"}, {"type": ["null", "array"]}):
        answer = ask(demo_endpoint, response_format={"type": "json_object", "schema": schema})
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, "response_format.schema")


def test_a_property_that_says_itself_that_it_is_required_is_named(demo_endpoint: str) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer", "required": True}}}
    form = {"type": "json_schema", "json_schema": {"schema": schema}}
    answer = ask(demo_endpoint, response_format=form)
    name = "response_format.json_schema.schema/properties/a/required"
    assert answer.headers["nanocore-ignored"] == name
    form["json_schema"]["strict"] = True
    assert ask(demo_endpoint, response_format=form).status_code == 400


def test_half_a_surrogate_pair_is_called_so(demo_endpoint: str) -> None:
    async def scenario() -> httpx.Response:
        async with app_of(demo_endpoint) as (_, http):
            body = rb'{"messages": [{"role": "user", "content": "a\ud83d"}]}'
            headers = {"content-type": "application/json"}
            return await http.post("/v1/chat/completions", content=body, headers=headers)

    answer = asyncio.run(scenario())
    assert answer.status_code == 400
    assert r"\ud83d is half a surrogate pair" in answer.json()["error"]["message"]
