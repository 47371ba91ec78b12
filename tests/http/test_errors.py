"""What goes wrong, in the words by which clients know it."""

from __future__ import annotations

import json

import pytest

from nanocore.http.errors import DRAINING, ENGINE_GONE, anthropic_body, http_error, openai_body
from nanocore.protocol.errors import (
    ContextLengthError,
    EngineDeadError,
    EngineDrainingError,
    EngineOverloadedError,
    InvalidRequestError,
    NanocoreError,
    ProtocolError,
)


@pytest.mark.parametrize(
    ("error", "status", "retry", "of_openai", "of_anthropic"),
    [
        (InvalidRequestError("no"), 400, None, "invalid_request_error", "invalid_request_error"),
        (EngineOverloadedError("no", 0.2), 429, b"1", "rate_limit_error", "rate_limit_error"),
        (EngineOverloadedError("no", 7.1), 429, b"8", "rate_limit_error", "rate_limit_error"),
        (EngineDrainingError("no", 3.0), 503, b"5", "server_error", "overloaded_error"),
        (EngineDeadError("no"), 503, b"1", "server_error", "overloaded_error"),
        (ProtocolError("no"), 500, None, "server_error", "api_error"),
    ],
)
def test_errors_of_the_client_have_a_status_and_a_kind(
    error: NanocoreError, status: int, retry: bytes | None, of_openai: str, of_anthropic: str
) -> None:
    found = http_error(error)
    assert (found.status, found.headers.get(b"retry-after")) == (status, retry)
    body = json.loads(openai_body(found))["error"]
    # What is said of sockets and engines is not for clients, who cannot help it.
    message = {EngineDeadError: ENGINE_GONE, EngineDrainingError: DRAINING}.get(type(error), "no")
    assert (body["type"], body["message"]) == (of_openai, message)
    whole = json.loads(anthropic_body(found))
    assert whole == {"type": "error", "error": {"type": of_anthropic, "message": message}}


def test_what_became_of_the_engine_is_for_the_log(caplog: pytest.LogCaptureFixture) -> None:
    found = http_error(EngineDeadError("nobody listens at ipc:///private/engine.sock"))
    assert "private" not in found.message
    assert caplog.messages == ["a request fails: nobody listens at ipc:///private/engine.sock"]


def test_a_prompt_that_is_too_long_is_known_by_what_clients_look_for() -> None:
    """OpenAI's code, litellm's words, and Claude Code's."""
    found = http_error(ContextLengthError("the prompt has 9 tokens, which is too long"))
    body = json.loads(openai_body(found))["error"]
    assert (found.status, body["code"]) == (400, "context_length_exceeded")
    assert "this model's maximum context length is" in body["message"].lower()
    assert json.loads(anthropic_body(found))["error"]["message"].startswith("prompt is too long: ")
