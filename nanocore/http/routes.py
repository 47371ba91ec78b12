"""The table of endpoints by method and path; docs/reference/http.md is made from it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from difflib import get_close_matches
from typing import Final, TypeAlias

import msgspec

from nanocore.http.dialects import anthropic_messages, chat_completions, completions
from nanocore.http.dialects.responses import response_request
from nanocore.http.endpoints import embeddings, page, status, tokenize
from nanocore.http.exchange import Exchange
from nanocore.http.http_errors import HttpError
from nanocore.http.request_record import Operation

Endpoint: TypeAlias = Callable[[Exchange], Awaitable[None]]


class Route(msgspec.Struct, frozen=True):
    """One endpoint.

    path: may end with {id}, which matches any text, slashes included. body: type of the request's
    JSON. is_open: needs no key. is_work: refused while the server shuts down. is_anthropic: errors
    have Anthropic's shape. operation: name of the request's span; None: no span. summary, query
    (URL parameters) and errors (statuses, apart from those of keys, bodies and work) are for the
    page that `tools.reference` makes.
    """

    method: str
    path: str
    endpoint: Endpoint
    summary: str
    body: type[msgspec.Struct] | None = None
    is_open: bool = False
    is_work: bool = False
    is_anthropic: bool = False
    operation: Operation | None = None
    errors: tuple[int, ...] = ()
    query: str = ""


ROUTES: Final[tuple[Route, ...]] = (
    Route("GET", "/", page.root,
        "Name and version; for browsers, which accept text/html, the web page.", is_open=True),
    Route("GET", "/page/{id}", page.file, "A file of the web page.", is_open=True),
    Route("GET", "/livez", status.livez,
        "Liveness: the process runs, also while it loads or drains.", is_open=True),
    Route("GET", "/readyz", status.readyz,
        "Readiness: new requests would be accepted. The engine is not asked.", is_open=True,
        errors=(503,)),
    Route("GET", "/health", status.health, "The engine responds.", is_open=True,
        errors=(500, 503)),
    Route("GET", "/ping", status.health, "Same as /health.", is_open=True, errors=(500, 503)),
    Route("GET", "/version", status.version, "The server's version.", is_open=True),
    Route("GET", "/metrics", status.metrics, "Metrics for Prometheus.", is_open=True,
        errors=(500, 503)),
    Route("GET", "/live", status.live, "The engine's last steps, and the phases of its requests.",
        errors=(400, 500, 503), query="`after` (only steps with larger numbers; default: 0)"),
    Route("GET", "/v1/models", status.list_models, "All names of the model.", errors=(503,)),
    Route("GET", "/v1/models/{id}", status.get_model, "One name of the model.", errors=(503,)),
    Route("POST", "/v1/chat/completions", chat_completions.serve,
        "OpenAI's chat completions, with vLLM's additional fields.",
        body=chat_completions.ChatCompletionRequest, is_work=True, operation="chat"),
    Route("POST", "/v1/messages", anthropic_messages.serve,
        "Anthropic's messages, with vLLM's additional sampling fields.",
        body=anthropic_messages.MessagesRequest, is_work=True, is_anthropic=True,
        operation="chat"),
    Route("POST", "/v1/messages/count_tokens", anthropic_messages.count_tokens,
        "Number of tokens of a request's prompt, as input_tokens.",
        body=anthropic_messages.CountTokensRequest, is_work=True, is_anthropic=True),
    Route("POST", "/v1/completions", completions.serve,
        "OpenAI's completions, with vLLM's additional fields.", body=completions.CompletionRequest,
        is_work=True, operation="text_completion"),
    Route("POST", "/v1/embeddings", embeddings.serve, "OpenAI's embeddings.",
        body=embeddings.EmbeddingRequest, is_work=True, operation="embeddings"),
    Route("POST", "/tokenize", tokenize.tokenize, "Token ids of a text or a conversation.",
        body=tokenize.TokenizeRequest, is_work=True),
    Route("POST", "/detokenize", tokenize.detokenize, "Text of token ids, as prompt.",
        body=tokenize.DetokenizeRequest, is_work=True),
    Route("GET", "/tokenizer_info", tokenize.tokenizer_info, "The model's tokenizer_config.json.",
        errors=(404, 500, 503)),
    Route("GET", "/tokenizer.json", tokenize.tokenizer_file,
        "The model's tokenizer, in the format of the tokenizers library.", errors=(400, 500, 503)),
    Route("POST", "/v1/responses", response_request.serve,
        "OpenAI's responses, with vLLM's additional sampling fields.",
        body=response_request.ResponsesRequest, is_work=True, operation="chat"),
    Route("GET", "/v1/responses/{id}", response_request.get, "A stored response.", errors=(400,)),
    Route("DELETE", "/v1/responses/{id}", response_request.delete, "Delete a stored response."),
)  # fmt: skip
_BY_PATH: Final = {
    path: {route.method: route for route in ROUTES if route.path == path}
    for path in dict.fromkeys(route.path for route in ROUTES)
}
_WITH_ID: Final = [path.removesuffix("{id}") for path in _BY_PATH if path.endswith("{id}")]


def find_route(method: str, path: str) -> tuple[Route, str]:
    """Return the route and the text in place of {id}. HEAD finds GET.

    Raises:
        HttpError: 404 for an unknown path, 405 for an unknown method of a known one.
    """
    pattern, path_id = _pattern(path)
    methods = _BY_PATH.get(pattern)
    if methods is None:
        raise HttpError(404, f"there is no {method} {path[:200]}: {_hint(path)}", "not_found")
    route = methods.get("GET" if method == "HEAD" else method)
    if route is None:
        allowed = ", ".join(sorted(methods))
        text = f"{path[:200]} does not support {method}: it supports {allowed}"
        raise HttpError(405, text, headers={b"allow": allowed.encode()})
    return route, path_id


_MAIN: Final = ", ".join(
    f"/v1/{name}"
    for name in ("chat/completions", "completions", "responses", "messages", "embeddings", "models")
)


def _hint(path: str) -> str:
    """Return what a client with an unknown path may have meant."""
    if path.startswith("/api/"):
        return "Ollama's API is not served here: use /v1/chat/completions"
    base = path[:200].rstrip("/")
    for other in (base, base.removeprefix("/v1"), f"/v1{base}"):  # a base URL with /v1, or without
        if _pattern(other)[0] in _BY_PATH:
            return f"did you mean {other}?"
    if near := get_close_matches(base, [one for one in _BY_PATH if "{" not in one], 1, 0.8):
        return f"did you mean {near[0]}?"
    return f"the main ones are {_MAIN}"


def _pattern(path: str) -> tuple[str, str]:
    """Return the table's path and the text in place of {id}; an unknown path unchanged."""
    if path not in _BY_PATH:
        for start in _WITH_ID:
            if path.startswith(start) and path != start:
                return start + "{id}", path.removeprefix(start)
    return path, ""
