"""Answers that are held to a form, through HTTP: response formats and forced calls."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx2 as httpx
import jsonschema
import pytest

from tests.http.in_process import app_of

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


def ask(endpoint: str, **body: Any) -> httpx.Response:
    async def scenario() -> httpx.Response:
        async with app_of(endpoint) as (_, http):
            asked = {"messages": QUESTION, "temperature": 0, "max_tokens": 100, **body}
            return await http.post("/v1/chat/completions", json=asked)

    return asyncio.run(scenario())


def function(name: str, parameters: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters, **more}}


def arguments(answer: httpx.Response) -> list[Any]:
    assert answer.status_code == 200, answer.text
    calls = answer.json()["choices"][0]["message"]["tool_calls"]
    return [json.loads(call["function"]["arguments"]) for call in calls]


@pytest.mark.parametrize(("choice", "root"), [("required", "/$defs/f"), (BY_NAME, "")])
def test_a_forced_call_of_a_tool_that_is_not_strict_is_held_as_far_as_it_can_be(
    demo_endpoint: str, choice: Any, root: str
) -> None:
    asked = {"tools": [function("f", RECORD)], "tool_choice": choice}
    answer = ask(demo_endpoint, **asked)
    for one in arguments(answer):
        jsonschema.validate(one, HELD)
    not_held = f"schema{root}/properties/tag/pattern, schema{root}/propertyNames"
    assert answer.headers["nanocore-ignored"] == not_held
    assert ask(demo_endpoint, **asked, stream=True).headers["nanocore-ignored"] == not_held
    strict = ask(demo_endpoint, tools=[function("f", RECORD, strict=True)], tool_choice=choice)
    assert (strict.status_code, "propertyNames" in strict.text) == (400, True)


def test_one_tool_that_the_grammar_cannot_hold_leaves_the_others_as_they_are(
    demo_endpoint: str,
) -> None:
    tools = [function("f", RECORD), function("g", HELD, strict=True), function("h", HELD)]
    answer = ask(demo_endpoint, tools=tools, tool_choice="required")
    assert arguments(answer)
    assert answer.headers["nanocore-ignored"].count("schema/") == 2


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
    assert answer.headers["nanocore-ignored"] == (
        "schema/properties/tag/pattern, schema/propertyNames"
    )


def test_a_strict_response_format_that_the_grammar_lacks_is_refused(demo_endpoint: str) -> None:
    strict = {"type": "json_schema", "json_schema": {"schema": RECORD, "strict": True}}
    assert ask(demo_endpoint, response_format=strict).status_code == 400
    odd = ask(demo_endpoint, response_format={"type": "json_object", "schema": "object"})
    assert odd.status_code == 400


@pytest.mark.parametrize(
    "limits",
    [
        {"structured_outputs": {"choice": ["ab"]}, "min_tokens": 20},
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"const": 1}}},
         "min_tokens": 20},
        {"structured_outputs": {"choice": ["a"]}, "allowed_token_ids": [5]},
    ],
)  # fmt: skip
def test_a_request_whose_own_limits_leave_no_token_is_a_bad_one(
    demo_endpoint: str, limits: dict[str, Any]
) -> None:
    answer = ask(demo_endpoint, **limits)
    assert answer.status_code == 400, answer.text
    assert "no token is left to choose" in answer.json()["error"]["message"]
