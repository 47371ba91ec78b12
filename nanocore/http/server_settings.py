"""Settings of the HTTP server and its application, fixed at start.

All worker processes of a server have the same settings, which travel to them as JSON.
"""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from typing import Any, Final

import msgspec

RESUME_TIMEOUT_S: Final = 60.0
MAX_BODY_BYTES: Final = 8 * 2**20
KEEP_ALIVE_S: Final = 15.0
STORED_RESPONSES_BYTES: Final = 64 * 2**20


class AppSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of the application.

    served_model_names: names by which clients may ask for the model; the first one is in responses;
    empty: the engine's name. api_keys: accepted keys; empty: none is needed. tool_parser,
    reasoning_parser, default_chat_template_kwargs, chat_template: see `ChatOptions`.
    allowed_template_kwargs: template variables that requests may set in addition to the usual ones.
    keep_alive_s: seconds of silence before a stream sends a keep-alive comment.
    stored_responses_bytes: limit for the stored responses of /v1/responses; 0: none are stored.
    allowed_origins: origins of web pages that may call from other hosts. allowed_hosts: Host names
    accepted when there are no keys, in addition to localhost and addresses; None: any (a Unix
    socket, which browsers cannot reach). otlp_traces_endpoint: URL to which request spans are sent;
    None: none are. metrics_namespace: prefix of metric names.
    """

    served_model_names: tuple[str, ...] = ()
    api_keys: tuple[str, ...] = ()
    max_body_bytes: int = MAX_BODY_BYTES
    tool_parser: str | None = "auto"
    reasoning_parser: str | None = "auto"
    default_chat_template_kwargs: Mapping[str, Any] = {}
    allowed_template_kwargs: tuple[str, ...] = ()
    chat_template: str | None = None
    keep_alive_s: float = KEEP_ALIVE_S
    stored_responses_bytes: int = STORED_RESPONSES_BYTES
    allowed_origins: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] | None = None
    otlp_traces_endpoint: str | None = None
    metrics_namespace: str = "nanocore"


class ConnectionLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits for one client connection.

    max_header_bytes: request line, headers and trailers of one message. header_timeout_s: from the
    start of the connection, or a request's first byte, to the end of its headers. body_timeout_s:
    from there to the end of its body. send_timeout_s: for a client that reads nothing of its
    response. keep_alive_timeout_s: between requests. max_connections: at once; others get a 503.
    """

    max_header_bytes: int = 64 * 1024
    header_timeout_s: float = 10.0
    body_timeout_s: float = 60.0
    send_timeout_s: float = 600.0
    keep_alive_timeout_s: float = 75.0
    max_connections: int = 65536


class ServerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of the server: limits, TLS and access log.

    ssl_ca_certs: authorities of client certificates. ssl_cert_reqs: whether clients must present
    one, as `ssl.VerifyMode`.
    """

    limits: ConnectionLimits = ConnectionLimits()
    ssl_keyfile: str | None = None
    ssl_certfile: str | None = None
    ssl_keyfile_password: str | None = None
    ssl_ca_certs: str | None = None
    ssl_cert_reqs: int = ssl.CERT_NONE
    access_log: bool = False

    @property
    def scheme(self) -> str:
        return "http" if self.ssl_certfile is None else "https"


class EngineAddress(msgspec.Struct, frozen=True, kw_only=True):
    """Arguments of `AsyncEngineClient.connect`. It travels to worker processes as JSON."""

    endpoint: tuple[str, ...]
    curve_dir: str | None = None
    tokenizer: str | None = None
    resume_timeout_s: float = RESUME_TIMEOUT_S
