"""Which endpoint serves which method and path; the OpenAPI document is made from the same table."""

from __future__ import annotations

from functools import cache
from typing import Final

import msgspec

from nanocore import __version__
from nanocore.http.dialects import (
    chat_completions,
    completions,
    message_fields,
    messages,
    responses,
    stored_responses,
)
from nanocore.http.endpoints import embeddings, live, models, page, probes, tokenize
from nanocore.http.errors import HttpError
from nanocore.http.exchange import Exchange
from nanocore.http.openapi import openapi_document
from nanocore.http.route import Route


async def openapi(exchange: Exchange) -> None:
    """This document: OpenAPI 3.1, as JSON."""
    await exchange.reply(200, _document())


ROUTES: Final[tuple[Route, ...]] = (
    Route("GET", "/", page.root, is_open=True),
    Route("GET", "/page/{id}", page.file, is_open=True),
    Route("GET", "/livez", probes.livez, is_open=True),
    Route("GET", "/readyz", probes.readyz, is_open=True),
    Route("GET", "/health", probes.health, is_open=True),
    Route("GET", "/ping", probes.health, is_open=True),
    Route("GET", "/version", probes.version, is_open=True),
    Route("GET", "/metrics", probes.metrics, is_open=True),
    Route("GET", "/openapi.json", openapi, is_open=True),
    Route("GET", "/live", live.live),
    Route("GET", "/v1/models", models.list_models),
    Route("GET", "/v1/models/{id}", models.get_model),
    Route(
        "POST",
        "/v1/chat/completions",
        chat_completions.serve,
        chat_completions.ChatCompletionRequest,
        is_work=True,
        operation="chat",
    ),
    Route(
        "POST",
        "/v1/messages",
        messages.serve,
        message_fields.MessagesRequest,
        is_work=True,
        is_anthropic=True,
        operation="chat",
    ),
    Route(
        "POST",
        "/v1/messages/count_tokens",
        messages.count_tokens,
        message_fields.CountTokensRequest,
        is_work=True,
        is_anthropic=True,
    ),
    Route(
        "POST",
        "/v1/completions",
        completions.serve,
        completions.CompletionRequest,
        is_work=True,
        operation="text_completion",
    ),
    Route(
        "POST",
        "/v1/embeddings",
        embeddings.serve,
        embeddings.EmbeddingRequest,
        is_work=True,
        operation="embeddings",
    ),
    Route("POST", "/tokenize", tokenize.tokenize, tokenize.TokenizeRequest, is_work=True),
    Route("POST", "/detokenize", tokenize.detokenize, tokenize.DetokenizeRequest, is_work=True),
    Route("GET", "/tokenizer_info", tokenize.tokenizer_info),
    Route(
        "POST",
        "/v1/responses",
        responses.serve,
        responses.ResponsesRequest,
        is_work=True,
        operation="chat",
    ),
    Route("GET", "/v1/responses/{id}", stored_responses.get),
    Route("DELETE", "/v1/responses/{id}", stored_responses.delete),
    Route("GET", "/v1/responses/{id}/input_items", stored_responses.list_input_items),
    Route("POST", "/v1/responses/{id}/cancel", stored_responses.cancel),
)
_BY_PATH: Final = {
    path: {route.method: route for route in ROUTES if route.path == path}
    for path in dict.fromkeys(route.path for route in ROUTES)
}
# The longest ending first: "/v1/responses/{id}/cancel" is no id of "/v1/responses/{id}".
_WITH_ID: Final = sorted(
    (path.partition("{id}")[::2] for path in _BY_PATH if "{id}" in path),
    key=lambda around: -len(around[1]),
)


@cache
def _document() -> bytes:
    return msgspec.json.encode(openapi_document(ROUTES, __version__))


def find_route(method: str, path: str) -> tuple[Route, str]:
    """(the route, what its path has in the place of {id}). HEAD is served as GET.

    Raises:
        HttpError: there is no such path, or it has other methods.
    """
    pattern, path_id = _pattern(path)
    methods = _BY_PATH.get(pattern)
    if methods is None:
        known = ", ".join(f"{route.method} {route.path}" for route in ROUTES)
        text = f"there is no {method} {path[:200]}: this server has {known}"
        raise HttpError(404, text, "not_found")
    route = methods.get("GET" if method == "HEAD" else method)
    if route is None:
        allowed = ", ".join(sorted(methods))
        text = f"{path[:200]} has no {method}: it has {allowed}"
        raise HttpError(405, text, headers={b"allow": allowed.encode()})
    return route, path_id


def _pattern(path: str) -> tuple[str, str]:
    """(the path as the table has it, what stands for {id}); one that it has not is kept."""
    if path not in _BY_PATH:
        for start, end in _WITH_ID:
            path_id = path[len(start) : len(path) - len(end)]
            if path_id and path.startswith(start) and path.endswith(end):
                return start + "{id}" + end, path_id
    return path, ""
