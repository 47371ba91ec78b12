"""The OpenAPI 3.1 document, made of the table of routes, their bodies' types, and `NOTES`.

What an endpoint can answer follows from its line of the table, so that none is forgotten: whoever
reads a body can refuse it, whoever asks the engine can fail as it can. Ranges of sampling
parameters are those of `SamplingParams`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

import msgspec

from nanocore.client import SamplingParams
from nanocore.http.answers import AnthropicError, OpenAIError
from nanocore.http.endpoint_notes import JSON, NOTES, EndpointNote
from nanocore.http.request_details import DETAILS, PARTS
from nanocore.http.route import Route

_REF: Final = "#/components/schemas/{name}"
_ABOUT: Final = (
    "An engine for language models. A HEAD request is answered as GET, without the body. A path"
    " that does not exist gets 404, and a method that a path does not have 405, both with an"
    " error as OpenAI's APIs have it. What is no HTTP is answered with 400 and a text. Keys are"
    " asked for if the server has any: as a bearer token, or in x-api-key."
)
_DESCRIPTIONS: Final = {
    400: "The request cannot be served as it is written.",
    401: "No valid API key.",
    403: "A server without keys, asked by another name than its own, or by another site's page.",
    404: "There is no such thing.",
    408: "The body has not come in time.",
    413: "The body is too large.",
    415: "The body is no application/json, or is compressed.",
    429: "Too many requests wait: come back later.",
    500: "The engine has failed to serve the request.",
    503: "The server is loading or shutting down, or its engine is gone: come back later.",
}
_BODY_ERRORS: Final = (400, 408, 413, 415)
_WORK_ERRORS: Final = (429, 500, 503)
_ENGINE_ERRORS: Final = (500, 503)
_HEADERS: Final = {
    "x-request-id": "The request's own, or one of ours.",
    "nanocore-ignored": "Fields of the body that are not known and have no effect, and keywords of "
    "lenient schemas that the answer is not held to.",
    "nanocore-tool-prompt": "How the model sees tools that its chat template does not show: by a "
    "generic text of ours, or none.",
    "retry-after": "Seconds.",
}


def openapi_document(routes: Sequence[Route], version: str) -> dict[str, Any]:
    """The document, as JSON values. version: of the server."""
    notes = [NOTES[route.method, route.path] for route in routes]
    schemas, ref = _schemas(routes, notes)
    paths: dict[str, dict[str, Any]] = {}
    for route, note in zip(routes, notes, strict=True):
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route, note, ref)
    return {
        "openapi": "3.1.0",
        "info": {"title": "nanocore", "version": version, "description": _ABOUT},
        "paths": paths,
        "components": {
            "schemas": schemas,
            "headers": {
                name: {"description": text, "schema": {"type": "string"}}
                for name, text in _HEADERS.items()
            },
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
    }


# -- operations ---------------------------------------------------------------------------------


def _operation(
    route: Route, note: EndpointNote, ref: Callable[[type], dict[str, Any]]
) -> dict[str, Any]:
    answers = {str(status): _error(route, status, ref) for status in _errors(route, note)}
    if not note.is_refused:
        answers["200"] = _success(note, ref)
    operation: dict[str, Any] = {
        "operationId": _operation_id(route),
        "summary": note.summary,
        "parameters": _parameters(route, note),
        "responses": dict(sorted(answers.items())),
        "security": [] if route.is_open else [{"bearer": []}, {"x-api-key": []}],
    }
    if route.body is not None:
        operation["requestBody"] = {
            "required": True,
            "content": {JSON: {"schema": ref(route.body)}},
        }
    return operation


def _parameters(route: Route, note: EndpointNote) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    if "{id}" in route.path:
        schema = {"type": "string", "minLength": 1}
        found.append({"name": "id", "in": "path", "required": True, "schema": schema})
    for name, schema in note.query.items():
        found.append({"name": name, "in": "query", "schema": schema})
    return found


def _operation_id(route: Route) -> str:
    words = re.findall(r"\w+", route.path) or ["root"]
    return "_".join([route.method.lower(), *words])


def _errors(route: Route, note: EndpointNote) -> set[int]:
    """Statuses that it can answer beside 200."""
    found = set(note.errors)
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
    elif not note.is_local:
        found.update(_ENGINE_ERRORS)
    return found


def _success(note: EndpointNote, ref: Callable[[type], dict[str, Any]]) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "object" if note.content_type == JSON else "string"}
    if note.answer is not None:
        schema = ref(note.answer)
    content = {note.content_type: {"schema": schema}}
    description = "All is well."
    if note.is_stream:
        content["text/event-stream"] = {}
        description = "Whole, or as events for a request with stream: true."
    return {
        "description": description,
        "headers": _headers("x-request-id", "nanocore-ignored", "nanocore-tool-prompt"),
        "content": content,
    }


def _error(route: Route, status: int, ref: Callable[[type], dict[str, Any]]) -> dict[str, Any]:
    names = ("x-request-id", "retry-after") if status in (429, 503) else ("x-request-id",)
    kind = AnthropicError if route.is_anthropic else OpenAIError
    return {
        "description": _DESCRIPTIONS[status],
        "headers": _headers(*names),
        "content": {JSON: {"schema": ref(kind)}},
    }


def _headers(*names: str) -> dict[str, Any]:
    return {name: {"$ref": f"#/components/headers/{name}"} for name in names}


# -- schemas ------------------------------------------------------------------------------------


def _schemas(
    routes: Sequence[Route], notes: Iterable[EndpointNote]
) -> tuple[dict[str, Any], Callable[[type], dict[str, Any]]]:
    """All that are referred to, by name; and what refers to a type's."""
    bodies = [route.body for route in routes if route.body is not None]
    answers = [note.answer for note in notes if note.answer is not None]
    errors = [AnthropicError] if any(route.is_anthropic for route in routes) else []
    types = list(dict.fromkeys([*bodies, *answers, *PARTS, OpenAIError, *errors]))
    refs, schemas = msgspec.json.schema_components(types, ref_template=_REF)
    places = dict(zip(types, refs, strict=True))
    limits = msgspec.json.schema(SamplingParams)["$defs"]["SamplingParams"]["properties"]
    for body in bodies:
        properties = schemas[places[body]["$ref"].rpartition("/")[2]]["properties"]
        for name, schema in properties.items():
            _limit(schema, limits.get(name, {}))
            for part in schema.get("anyOf", [schema]):
                if part.get("type") == "array":
                    part |= DETAILS.get((body.__name__, name), {})
    return schemas, places.__getitem__


def _limit(schema: dict[str, Any], limits: dict[str, Any]) -> None:
    """Give a field, where it is no null, the limits of the sampling parameter of its name."""
    for own in schema.get("anyOf", [schema]):
        for known in limits.get("anyOf", [limits]):
            if own.get("type") == known.get("type"):
                same = ("type", "default", "since", "items", "description", "$ref")
                own |= {key: value for key, value in known.items() if key not in same}
