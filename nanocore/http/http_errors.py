"""Errors as HTTP responses: a status, headers, and a body in each dialect's shape.

The SDKs retry on 408, 409, 429 and 5xx, so a request that can never succeed gets another 4xx.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Mapping
from typing import Final

import msgspec

from nanocore.protocol.errors import (
    ContextLengthError,
    EngineDeadError,
    EngineDrainingError,
    EngineOverloadedError,
    InvalidRequestError,
    NanocoreError,
)

logger = logging.getLogger(__name__)

_OPENAI_TYPES: Final = {
    401: "authentication_error",
    404: "not_found_error",
    429: "rate_limit_error",
}
_ANTHROPIC_TYPES: Final = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
_LENGTHS: Final = re.compile(r"the prompt has (\d+) tokens?\b.* max_model_len=(\d+)")
RETRY_S: Final = 1.0
RETRY_LATER_S: Final = 5.0
"""Retry-After while the server starts, drains or shuts down."""
ENGINE_GONE: Final = "the engine is gone or stopping: retry later"
DRAINING: Final = "the engine is draining and takes no new requests: retry later"
TOO_LONG: Final = "context_length_exceeded"


class HttpError(Exception):
    """An error response.

    Args:
        message: the problem, the value, the limit and a remedy.
        code: machine-readable, one of OpenAI's where there is one.
        param: the request field at fault.
        headers: added to the response.
    """

    def __init__(
        self,
        status: int,
        message: str,
        code: str | None = None,
        param: str | None = None,
        headers: Mapping[bytes, bytes] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        self.headers = dict(headers or {})


def bad_request(message: str, param: str | None = None, code: str | None = None) -> HttpError:
    return HttpError(400, message, code, param)


def unavailable(message: str, retry_after_s: float = RETRY_S) -> HttpError:
    return HttpError(503, message, "unavailable", headers=_retry_after(retry_after_s))


def http_error(error: NanocoreError) -> HttpError:
    """Return the response for an error of the client library or the engine."""
    if isinstance(error, ContextLengthError):
        return HttpError(400, str(error), TOO_LONG)
    if isinstance(error, InvalidRequestError):
        return HttpError(400, str(error), param=error.param)
    if isinstance(error, EngineDrainingError):
        return unavailable(DRAINING, RETRY_LATER_S)
    if isinstance(error, EngineOverloadedError):
        headers = _retry_after(error.retry_after_s)
        return HttpError(429, str(error), "rate_limit_exceeded", headers=headers)
    if isinstance(error, EngineDeadError):
        # Its text has the engine's endpoint, which clients must not see: log it only.
        logger.warning("request failed: %s", error)
        return unavailable(ENGINE_GONE)
    return HttpError(500, str(error), "internal_error")


def openai_body(error: HttpError) -> bytes:
    kind = _OPENAI_TYPES.get(
        error.status, "server_error" if error.status >= 500 else "invalid_request_error"
    )
    message = error.message
    if error.code == TOO_LONG:  # litellm recognizes the error by this wording
        message = f"This model's maximum context length is exceeded: {message}"
    details = {"message": message, "type": kind, "param": error.param, "code": error.code}
    return msgspec.json.encode({"error": details})


def anthropic_body(error: HttpError) -> bytes:
    kind = _ANTHROPIC_TYPES.get(
        error.status, "api_error" if error.status >= 500 else "invalid_request_error"
    )
    message = error.message
    if error.code == TOO_LONG:
        # Claude Code compacts the conversation when it reads this wording.
        found = _LENGTHS.search(message)
        known = f"{found[1]} tokens > {found[2]} maximum: " if found else ""
        message = f"prompt is too long: {known}{message}"
    return msgspec.json.encode({"error": {"type": kind, "message": message}, "type": "error"})


def _retry_after(seconds: float) -> dict[bytes, bytes]:
    return {b"retry-after": b"%d" % max(1, math.ceil(seconds))}  # whole seconds
