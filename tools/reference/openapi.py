"""The OpenAPI 3.1 document, made from the table of routes and the types of bodies and responses.

The errors of an endpoint follow from its route: one that reads a body can reject it, one that asks
the engine can fail as the engine does. Ranges of sampling parameters are those of `SamplingParams`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeAlias

import msgspec

from nanocore.client import SamplingParams
from nanocore.http.http_errors import AnthropicError, OpenAIError
from nanocore.http.routes import JSON, Route

SchemaOf: TypeAlias = Callable[[type], dict[str, Any]]
_REF: Final = "#/components/schemas/{name}"
_ABOUT: Final = (
    "nanocore, an LLM inference engine. HEAD is served as GET without a body. An unknown path gets"
    " 404, an unknown method 405, both with an OpenAI error body; input that is not HTTP gets 400"
    " with an OpenAI error body. If the server has API keys, send one as a bearer token or in"
    " x-api-key."
)
_DESCRIPTIONS: Final = {
    400: "The request is invalid.",
    401: "No valid API key.",
    403: "A server without keys was addressed by a foreign host name or by another site's page.",
    404: "Not found.",
    408: "The body did not arrive in time.",
    413: "The body is too large.",
    415: "The body is not application/json, or is compressed.",
    429: "Too many requests are waiting: retry later.",
    500: "The engine failed to serve the request.",
    503: "The server is loading or shutting down, or its engine is gone: retry later.",
}
_BODY_ERRORS: Final = (400, 408, 413, 415)
_WORK_ERRORS: Final = (429, 500, 503)
_ENGINE_ERRORS: Final = (500, 503)
_HEADERS: Final = {
    "x-request-id": "The request's own id, or a generated one.",
    "nanocore-ignored": "Unknown body fields, which have no effect, and schema keywords that a "
    "lenient schema does not enforce.",
    "nanocore-tool-prompt": "How the model sees tools that its chat template does not render: by "
    "a generic text, or not at all.",
    "retry-after": "Seconds.",
}
_CHAT_MESSAGE: Final = {
    "type": "object",
    "required": ["role"],
    "properties": {
        "role": {"type": "string"},
        "content": {"anyOf": [{"type": ["string", "null"]}, {"type": "array"}]},
        "tool_calls": {"type": ["array", "null"], "items": {"type": "object"}},
        "tool_call_id": {"type": ["string", "null"]},
    },
}
"""Schema for items of `messages`, which are dicts in the body's type and checked by the client."""


def openapi_document(routes: Sequence[Route], version: str) -> dict[str, Any]:
    """Return the document as JSON values. version: the server's."""
    schemas, schema_of = _schemas(routes)
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route, schema_of)
    headers = {
        name: {"description": text, "schema": {"type": "string"}} for name, text in _HEADERS.items()
    }
    return {
        "openapi": "3.1.0",
        "info": {"title": "nanocore", "version": version, "description": _ABOUT},
        "paths": paths,
        "components": {
            "schemas": schemas,
            "headers": headers,
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
    }


def _operation(route: Route, schema_of: SchemaOf) -> dict[str, Any]:
    responses = {str(status): _error(route, status, schema_of) for status in _errors(route)}
    if not route.is_refused:
        responses["200"] = _success(route, schema_of)
    words = re.findall(r"\w+", route.path) or ["root"]
    parameters: list[dict[str, Any]] = [
        {"name": name, "in": "query", "schema": schema} for name, schema in route.query.items()
    ]
    if "{id}" in route.path:
        schema = {"type": "string", "minLength": 1}
        parameters.append({"name": "id", "in": "path", "required": True, "schema": schema})
    operation: dict[str, Any] = {
        "operationId": "_".join([route.method.lower(), *words]),
        "summary": route.summary,
        "parameters": parameters,
        "responses": dict(sorted(responses.items())),
        "security": [] if route.is_open else [{"bearer": []}, {"x-api-key": []}],
    }
    if route.body is not None:
        content = {JSON: {"schema": schema_of(route.body)}}
        operation["requestBody"] = {"required": True, "content": content}
    return operation


def _errors(route: Route) -> set[int]:
    found = set(route.errors)
    if not route.is_open:
        found.update((401, 403))
    if "{id}" in route.path:
        found.add(404)
    if route.body is not None:
        found.update(_BODY_ERRORS)
        if "model" in route.body.__struct_encode_fields__:
            found.add(404)
    if route.is_work:
        found.update(_WORK_ERRORS)
    elif not route.is_local:
        found.update(_ENGINE_ERRORS)
    return found


def _success(route: Route, schema_of: SchemaOf) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "object" if route.content_type == JSON else "string"}
    if isinstance(route.response, type):
        schema = schema_of(route.response)
    elif route.response is not None:
        fields = {name: msgspec.json.schema(kind) for name, kind in route.response.items()}
        schema |= {"properties": fields, "required": list(fields)}
    content = {route.content_type: {"schema": schema}}
    description = "Success."
    if route.is_stream:
        content["text/event-stream"] = {}
        description = "The whole response, or server-sent events with stream: true."
    return {
        "description": description,
        "headers": _header_refs("x-request-id", "nanocore-ignored", "nanocore-tool-prompt"),
        "content": content,
    }


def _error(route: Route, status: int, schema_of: SchemaOf) -> dict[str, Any]:
    names = ("x-request-id", "retry-after") if status in (429, 503) else ("x-request-id",)
    kind = AnthropicError if route.is_anthropic else OpenAIError
    return {
        "description": _DESCRIPTIONS[status],
        "headers": _header_refs(*names),
        "content": {JSON: {"schema": schema_of(kind)}},
    }


def _header_refs(*names: str) -> dict[str, Any]:
    return {name: {"$ref": f"#/components/headers/{name}"} for name in names}


def _schemas(routes: Sequence[Route]) -> tuple[dict[str, Any], SchemaOf]:
    """Return all named schemas, and a function from a type to its reference."""
    bodies = [route.body for route in routes if route.body is not None]
    responses = [route.response for route in routes if isinstance(route.response, type)]
    errors = {AnthropicError if route.is_anthropic else OpenAIError for route in routes}
    types = list(dict.fromkeys([*bodies, *responses, *sorted(errors, key=str)]))
    refs, schemas = msgspec.json.schema_components(types, ref_template=_REF)
    ref_of = dict(zip(types, refs, strict=True))
    from_clients = msgspec.json.schema_components(bodies)[1]
    for name, schema in schemas.items():
        if name not in from_clients:  # responses hold fields with defaults, too
            fields = schema["properties"]
            always = {*schema["required"], *(key for key in fields if "default" in fields[key])}
            schema["required"] = [key for key in fields if key in always]
    limits = msgspec.json.schema(SamplingParams)["$defs"]["SamplingParams"]["properties"]
    for body in bodies:
        properties = schemas[ref_of[body]["$ref"].rpartition("/")[2]]["properties"]
        for name, schema in properties.items():
            _add_limits(schema, limits.get(name, {}))
            for part in schema.get("anyOf", [schema]) if name == "messages" else ():
                if part.get("items") == {"type": "object"}:
                    part |= {"items": _CHAT_MESSAGE, "minItems": 1}
    return schemas, ref_of.__getitem__


def _add_limits(schema: dict[str, Any], limits: dict[str, Any]) -> None:
    """Give a field the range of the sampling parameter of its name; null stays allowed."""
    for own in schema.get("anyOf", [schema]):
        for known in limits.get("anyOf", [limits]):
            if own.get("type") == known.get("type"):
                same = ("type", "default", "since", "items", "description", "$ref")
                own |= {key: value for key, value in known.items() if key not in same}
