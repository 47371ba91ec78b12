"""What goes wrong, as HTTP says it: a status, and a body in the shape of each dialect.

Statuses are chosen by what clients do with them: the SDKs send a request again on 408, 409, 429 and
5xx, so what will never be served is another 4xx.
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
_LENGTHS: Final = re.compile(r"the prompt has (\d+) tokens.* max_model_len=(\d+)")
RETRY_S: Final = 1.0
RETRY_LATER_S: Final = 5.0
"""Of a server that ends, or begins."""
ENGINE_GONE: Final = "the engine is gone, or stopping: send the request again, later"
DRAINING: Final = "the engine finishes what it has, and takes nothing new: try again, later"
TOO_LONG: Final = "context_length_exceeded"


class HttpError(Exception):
    """An answer that is an error.

    message: what, value, limit, remedy. code: for programs, as OpenAI has them. param: the field of
    the request that it is about. headers: of the answer.
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
        self.status, self.message, self.code, self.param = status, message, code, param
        self.headers = dict(headers or {})


def bad_request(message: str, param: str | None = None, code: str | None = None) -> HttpError:
    """A request that cannot be served as it is written."""
    return HttpError(400, message, code, param)


def unavailable(message: str, retry_after_s: float = RETRY_S) -> HttpError:
    """A server that cannot serve now."""
    return HttpError(503, message, "unavailable", headers=_retry_after(retry_after_s))


def http_error(error: NanocoreError) -> HttpError:
    """The answer to a request that the client or its engine refuses, or fails to serve."""
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
        logger.warning("a request fails: %s", error)  # where the engine was is not for clients
        return unavailable(ENGINE_GONE)
    return HttpError(500, str(error), "internal_error")


def openai_body(error: HttpError) -> bytes:
    """The error as OpenAI's APIs have it."""
    kind = _OPENAI_TYPES.get(
        error.status, "server_error" if error.status >= 500 else "invalid_request_error"
    )
    message = error.message
    if error.code == TOO_LONG:  # litellm knows it by these words alone
        message = f"This model's maximum context length is exceeded: {message}"
    return msgspec.json.encode(
        {
            "error": {
                "message": message,
                "type": kind,
                "param": error.param,
                "code": error.code,
            }
        }
    )


def anthropic_body(error: HttpError) -> bytes:
    """The error as Anthropic's API has it."""
    kind = _ANTHROPIC_TYPES.get(
        error.status, "api_error" if error.status >= 500 else "invalid_request_error"
    )
    message = error.message
    if error.code == TOO_LONG:
        found = _LENGTHS.search(message)  # Claude Code knows it by these words, and shortens
        known = f"{found[1]} tokens > {found[2]} maximum: " if found else ""
        message = f"prompt is too long: {known}{message}"
    return msgspec.json.encode({"type": "error", "error": {"type": kind, "message": message}})


def _retry_after(seconds: float) -> dict[bytes, bytes]:
    """Whole seconds, as HTTP wants them."""
    return {b"retry-after": b"%d" % max(1, math.ceil(seconds))}
