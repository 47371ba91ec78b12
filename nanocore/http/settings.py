"""What the HTTP application is told at its start."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec

MAX_BODY_BYTES: Final = 8 * 2**20
KEEP_ALIVE_S: Final = 15.0
STORED_RESPONSES_BYTES: Final = 64 * 2**20


class AppSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Of one server, all its worker processes alike; it travels to them as JSON.

    served_model_names: what clients may call the model, the first of them being its name in
    answers; empty: as the engine was told. api_keys: any of them lets a client in; empty: nobody is
    asked. max_body_bytes: of a request. tool_parser, reasoning_parser: of `ChatOptions`.
    default_chat_template_kwargs: for the template, where a request does not say otherwise.
    allowed_template_kwargs: names that requests may set beside the usual ones. keep_alive_s: a
    stream that says nothing for so long gets a comment line. stored_responses_bytes: room for the
    answers that /v1/responses keeps; 0: it keeps none. allowed_origins: of web pages that may call
    from other hosts. allowed_hosts: names by which a server without keys may be asked, beside
    localhost and addresses; None: any, for no browser can ask it. otlp_traces_endpoint: URL to
    which spans of requests are sent; None: there are none. metrics_namespace: with which the names
    of metrics begin.
    """

    served_model_names: tuple[str, ...] = ()
    api_keys: tuple[str, ...] = ()
    max_body_bytes: int = MAX_BODY_BYTES
    tool_parser: str | None = "auto"
    reasoning_parser: str | None = "auto"
    default_chat_template_kwargs: Mapping[str, Any] = {}
    allowed_template_kwargs: tuple[str, ...] = ()
    keep_alive_s: float = KEEP_ALIVE_S
    stored_responses_bytes: int = STORED_RESPONSES_BYTES
    allowed_origins: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] | None = None
    otlp_traces_endpoint: str | None = None
    metrics_namespace: str = "nanocore"
