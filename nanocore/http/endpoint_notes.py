"""What the table of routes does not say of an endpoint, for the OpenAPI document alone.

A test holds it against the table: each endpoint has its line here, and there are no others.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from nanocore.http import answers
from nanocore.http.live_view import LiveView
from nanocore.protocol.fields import MAX_EXACT_INT

JSON: Final = "application/json"


class EndpointNote(msgspec.Struct, frozen=True, kw_only=True):
    """One endpoint.

    answer: the JSON object that it answers; None: any. content_type: if it is no JSON. is_stream:
    also server-sent events, for a request that says so. is_local: what the engine may do does not
    touch it. errors: statuses beside those that follow from the route. is_refused: it answers
    nothing else. query: parameters in the URL, with their JSON Schemas.
    """

    summary: str
    answer: type[msgspec.Struct] | None = None
    content_type: str = JSON
    is_stream: bool = False
    is_local: bool = False
    errors: tuple[int, ...] = ()
    is_refused: bool = False
    query: dict[str, dict[str, Any]] = {}


Note = EndpointNote
NOTES: Final = {
    ("GET", "/"): Note(
        summary="Is anybody there? For browsers, which ask for text/html, the web page.",
        answer=answers.Name,
        is_local=True,
    ),
    ("GET", "/page/{id}"): Note(
        summary="A file of the web page.", content_type="*/*", is_local=True
    ),
    ("GET", "/livez"): Note(
        summary="The process lives, also while it loads or drains.",
        answer=answers.Status,
        is_local=True,
    ),
    ("GET", "/readyz"): Note(
        summary="New requests would be taken; the engine is not asked.",
        answer=answers.Status,
        errors=(503,),
        is_local=True,
    ),
    ("GET", "/health"): Note(summary="The engine answers.", answer=answers.Status),
    ("GET", "/ping"): Note(summary="As /health.", answer=answers.Status),
    ("GET", "/version"): Note(
        summary="The server's version.", answer=answers.Version, is_local=True
    ),
    ("GET", "/metrics"): Note(summary="For Prometheus.", content_type="text/plain"),
    ("GET", "/openapi.json"): Note(summary="This document.", is_local=True),
    ("GET", "/live"): Note(
        summary="The engine's last steps, and the ways of its requests.",
        answer=LiveView,
        errors=(400,),
        query={
            "after": {
                "type": "integer",
                "minimum": 0,
                "maximum": MAX_EXACT_INT,
                "default": 0,
                "description": "Only steps with larger numbers.",
            },
        },
    ),
    ("GET", "/v1/models"): Note(
        summary="The names of the model.", answer=answers.ModelList, errors=(503,), is_local=True
    ),
    ("GET", "/v1/models/{id}"): Note(
        summary="One of the names.", answer=answers.Model, errors=(503,), is_local=True
    ),
    ("POST", "/v1/chat/completions"): Note(
        summary="OpenAI's chat, with vLLM's further fields.",
        answer=answers.ChatCompletion,
        is_stream=True,
    ),
    ("POST", "/v1/completions"): Note(
        summary="OpenAI's completions, with vLLM's further fields.",
        answer=answers.Completion,
        is_stream=True,
    ),
    ("POST", "/v1/embeddings"): Note(summary="OpenAI's embeddings.", answer=answers.EmbeddingList),
    ("POST", "/tokenize"): Note(
        summary="The token ids of a text or a conversation.", answer=answers.Tokens
    ),
    ("POST", "/detokenize"): Note(summary="What token ids say.", answer=answers.DetokenizedText),
    ("GET", "/tokenizer_info"): Note(
        summary="What the model's tokenizer_config.json says.", errors=(404,)
    ),
    ("POST", "/v1/responses"): Note(
        summary="OpenAI's responses, with vLLM's further sampling fields.",
        answer=answers.Response,
        is_stream=True,
    ),
    ("GET", "/v1/responses/{id}"): Note(
        summary="A stored response.", answer=answers.Response, errors=(400,), is_local=True
    ),
    ("DELETE", "/v1/responses/{id}"): Note(
        summary="Store it no longer.", answer=answers.DeletedResponse, is_local=True
    ),
    ("GET", "/v1/responses/{id}/input_items"): Note(
        summary="What a stored response was asked.",
        answer=answers.ItemList,
        errors=(400,),
        is_local=True,
        query={
            "order": {"enum": ["asc", "desc"], "default": "desc"},
            "limit": {"type": "integer", "minimum": 1, "maximum": 100, "default": 20},
            "after": {"type": "string"},
        },
    ),
    ("POST", "/v1/responses/{id}/cancel"): Note(
        summary="Refused: there are no background responses.",
        errors=(400,),
        is_local=True,
        is_refused=True,
    ),
    ("POST", "/v1/messages"): Note(
        summary="Anthropic's messages, with vLLM's further sampling fields.",
        answer=answers.AnthropicMessage,
        is_stream=True,
    ),
    ("POST", "/v1/messages/count_tokens"): Note(
        summary="How many tokens a request's prompt has.", answer=answers.InputTokens
    ),
}
"""By method and path, as `routes.ROUTES` has them."""
