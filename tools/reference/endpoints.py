"""The page of HTTP endpoints, from their OpenAPI document."""

from __future__ import annotations

from typing import Any

from nanocore.http.dialects.request_fields import SamplingFields
from nanocore.http.routes import ROUTES
from tools.reference.markdown import item, page, wrapped
from tools.reference.openapi import openapi_document

_SAMPLING = frozenset(SamplingFields.__struct_fields__)
_ABOUT = (
    "The endpoints of [nanocore serve](nanocore-serve.md). "
    "Errors have the body `OpenAIError`, or `AnthropicError` below "
    "`/v1/messages`; those that need a key also have 401 and 403. [Serving over HTTP](../http.md) "
    "explains what clients may rely on."
)
_OF_KEYS = "401", "403"
_OF_WORK = ["400", "404", "408", "413", "415", "429", "500", "503"]
"""What an endpoint can answer that reads a body and asks the engine, apart from keys' errors."""


def endpoints_page() -> str:
    """The page."""
    document = openapi_document(ROUTES, "")
    schemas = document["components"]["schemas"]
    sampling = ", ".join(f"`{name}`" for name in SamplingFields.__struct_fields__)
    parts = [
        wrapped(_ABOUT),
        "## Statuses",
        _statuses(document["paths"]),
        "## Sampling fields",
        wrapped(f"{sampling}."),
    ]
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            parts += [f"## `{method.upper()} {path}`", *_endpoint(operation, schemas)]
    return page("HTTP endpoints", *parts)


def _endpoint(operation: dict[str, Any], schemas: dict[str, Any]) -> list[str]:
    key = "" if operation["security"] else " No key is needed."
    about = [wrapped(operation["summary"] + key)]
    lines = []
    if "requestBody" in operation:
        content = operation["requestBody"]["content"]["application/json"]["schema"]
        body = schemas[content["$ref"].rpartition("/")[2]]
        required = body.get("required", [])
        shared = _SAMPLING if body["properties"].keys() >= _SAMPLING else frozenset[str]()
        names = [
            f"`{name}`" + (" (required)" if name in required else "")
            for name in body["properties"]
            if name not in shared
        ]
        more = " and the sampling fields" if shared else ""
        lines.append(item(f"Body: {', '.join(names)}{more}."))
    query = [one for one in operation["parameters"] if one["in"] == "query"]
    if query:
        shown = ", ".join(f"`{one['name']}` ({_schema(one['schema'])})" for one in query)
        lines.append(item(f"Query: {shown}."))
    answers = operation["responses"]
    success = [f"200{_body(answers['200'])}"] if "200" in answers else []
    errors = [status for status in answers if status not in ("200", *_OF_KEYS)]
    if errors == _OF_WORK:
        lines.append(item(f"Status: {success[0]}, and all errors."))
    else:
        lines.append(item(f"Status: {', '.join([*success, *errors])}."))
    return [*about, "\n".join(lines)]


def _statuses(paths: dict[str, Any]) -> str:
    """The meaning of each status, once: endpoints list the statuses they can have."""
    meanings: dict[str, str] = {}
    for methods in paths.values():
        for operation in methods.values():
            for status, answer in operation["responses"].items():
                meanings.setdefault(status, answer["description"])
    return "\n".join(item(f"{status}: {meanings[status]}") for status in sorted(meanings))


def _body(answer: dict[str, Any]) -> str:
    """The kinds of a successful response's body; errors have the dialect's error body."""
    kinds = []
    for content_type, content in answer.get("content", {}).items():
        ref = content.get("schema", {}).get("$ref")
        kinds.append(f"`{ref.rpartition('/')[2]}`" if ref else content_type)
    return f" ({', '.join(kinds)})" if kinds and "Error" not in kinds[0] else ""


def _schema(schema: dict[str, Any]) -> str:
    words = [", ".join(map(str, schema["enum"]))] if "enum" in schema else [schema["type"]]
    if "minimum" in schema:
        words.append(f"{schema['minimum']} to {schema['maximum']}")
    if "default" in schema:
        words.append(f"default: {schema['default']}")
    return "; ".join(words)
