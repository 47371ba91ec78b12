"""The OpenAPI document: what it says holds together, and is what the table of routes says."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Final

import msgspec
import pytest
from jsonschema import Draft202012Validator

from nanocore.http.routes import ROUTES
from tools.reference.openapi import openapi_document

DOCUMENT: Final[dict[str, Any]] = json.loads(msgspec.json.encode(openapi_document(ROUTES, "1.2.3")))


def operation(method: str, path: str) -> dict[str, Any]:
    found: dict[str, Any] = DOCUMENT["paths"][path][method.lower()]
    return found


def values(document: Any) -> Iterator[dict[str, Any]]:
    """All objects in it."""
    if isinstance(document, dict):
        yield document
        for value in document.values():
            yield from values(value)
    elif isinstance(document, list):
        for value in document:
            yield from values(value)


def resolved(reference: str) -> Any:
    found: Any = DOCUMENT
    for name in reference.removeprefix("#/").split("/"):
        found = found[name]
    return found


def test_every_route_is_there_once_in_valid_json_schema() -> None:
    operations = [
        (method.upper(), path) for path, item in DOCUMENT["paths"].items() for method in item
    ]
    assert sorted(operations) == sorted((route.method, route.path) for route in ROUTES)
    ids = [operation(*key)["operationId"] for key in operations]
    assert len(set(ids)) == len(ids)
    assert all(operation(*key)["summary"] for key in operations)

    for schema in DOCUMENT["components"]["schemas"].values():
        Draft202012Validator.check_schema(schema)


def test_every_reference_leads_to_something_and_everything_is_referred_to() -> None:
    references = {value["$ref"] for value in values(DOCUMENT) if "$ref" in value}
    assert all(resolved(reference) for reference in references)
    for kind in ("schemas", "headers"):
        named = {f"#/components/{kind}/{name}" for name in DOCUMENT["components"][kind]}
        assert named <= references
    asked = {
        name for value in values(DOCUMENT) for need in value.get("security", ()) for name in need
    }
    assert asked == set(DOCUMENT["components"]["securitySchemes"])


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: f"{route.method} {route.path}")
def test_errors_follow_from_what_an_endpoint_does(route: Any) -> None:
    described = operation(route.method, route.path)
    in_path = [one["name"] for one in described["parameters"] if one["in"] == "path"]
    assert in_path == (["id"] if "{id}" in route.path else [])
    statuses = set(described["responses"])
    assert ("401" in statuses) == (not route.is_open) == bool(described["security"])
    assert ({"400", "408", "413", "415"} <= statuses) == (route.body is not None)
    assert ("requestBody" in described) == (route.body is not None)
    if route.is_work:
        assert {"429", "500", "503"} <= statuses
    kind = "AnthropicError" if route.is_anthropic else "OpenAIError"
    for status, answer in described["responses"].items():
        if status != "200":
            schema = answer["content"]["application/json"]["schema"]
            assert schema == {"$ref": f"#/components/schemas/{kind}"}


def test_sampling_parameters_have_the_ranges_of_the_engine() -> None:
    properties = DOCUMENT["components"]["schemas"]["ChatCompletionRequest"]["properties"]
    numbers, null = properties["top_p"]["anyOf"]
    assert numbers == {"type": "number", "exclusiveMinimum": 0, "maximum": 1}
    assert null == {"type": "null"}
    assert properties["logprobs"]["anyOf"] == [{"type": "boolean"}, {"type": "null"}]


def test_a_body_as_documented_is_one() -> None:
    """And one that is not is none: messages are objects with a role."""
    schema = {**DOCUMENT, "$ref": "#/components/schemas/ChatCompletionRequest"}
    validator = Draft202012Validator(schema)
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    turns = [
        {"role": "user", "content": [{"type": "text", "text": "hi"}]},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "1"},
    ]
    validator.validate({"messages": turns, "max_tokens": 4, "of_tomorrow": 1})
    wrong: list[list[Any]] = [[], [{}], ["hi"], [{"role": "user", "content": 1}]]
    assert not any(validator.is_valid({"messages": messages}) for messages in wrong)
    assert not validator.is_valid({"messages": turns, "temperature": -1})


def test_usage_and_tool_calls_have_their_fields() -> None:
    schemas = DOCUMENT["components"]["schemas"]
    for name in ("ChatCompletion", "TextCompletion", "EmbeddingList"):
        usage = schemas[schemas[name]["properties"]["usage"]["$ref"].rpartition("/")[2]]
        assert {"prompt_tokens", "total_tokens"} <= {*usage["required"]}, name
    calls = schemas["AssistantMessage"]["properties"]["tool_calls"]["items"]["$ref"]
    assert schemas[calls.rpartition("/")[2]]["properties"].keys() == {"id", "type", "function"}


def test_fields_that_responses_always_have_are_required() -> None:
    for name in ("Model", "EmbeddingList", "AnthropicMessage", "ItemList"):
        schema = DOCUMENT["components"]["schemas"][name]
        assert {key for key, field in schema["properties"].items() if "default" in field}
        assert set(schema["required"]) == schema["properties"].keys(), name
    version = operation("GET", "/version")["responses"]["200"]["content"]["application/json"]
    assert version["schema"]["required"] == ["version"]
