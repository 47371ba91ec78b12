"""The page of HTTP endpoints, from the table of routes."""

from __future__ import annotations

import msgspec

from nanocore.http.dialects.request_fields import SamplingFields
from nanocore.http.routes import ROUTES, Route
from tools.reference.markdown import item, page, wrapped

_SAMPLING = frozenset(SamplingFields.__struct_fields__)
_ABOUT = (
    "The endpoints of [nanocore serve](nanocore-serve.md). HEAD is served as GET without a body. "
    "Errors have OpenAI's body, or Anthropic's below `/v1/messages`; those that need a key also "
    "have 401 and 403. [Serving over HTTP](../http.md) explains what clients may rely on."
)
_MEANINGS = {
    200: "Success.",
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
_OF_KEYS = 401, 403


def endpoints_page() -> str:
    """The page."""
    sampling = ", ".join(f"`{name}`" for name in SamplingFields.__struct_fields__)
    parts = [
        wrapped(_ABOUT),
        "## Statuses",
        "\n".join(item(f"{status}: {meaning}") for status, meaning in _MEANINGS.items()),
        "## Sampling fields",
        wrapped(f"{sampling}."),
    ]
    for route in ROUTES:
        parts += [f"## `{route.method} {route.path}`", *_endpoint(route)]
    return page("HTTP endpoints", *parts)


def _endpoint(route: Route) -> list[str]:
    key = " No key is needed." if route.is_open else ""
    lines = []
    names: set[str] = set()
    if route.body is not None:
        fields = msgspec.structs.fields(route.body)
        names = {field.name for field in fields}
        shared = _SAMPLING if names >= _SAMPLING else frozenset[str]()
        shown = [
            f"`{field.name}`" + (" (required)" if field.required else "")
            for field in fields
            if field.name not in shared
        ]
        more = " and the sampling fields" if shared else ""
        lines.append(item(f"Body: {', '.join(shown)}{more}."))
    if route.query:
        lines.append(item(f"Query: {route.query}."))
    success = "200, or server-sent events" if "stream" in names else "200"
    if route.is_work:
        lines.append(item(f"Status: {success}, and all errors."))
    else:
        lines.append(item(f"Status: {', '.join([success, *map(str, errors_of(route))])}."))
    return [wrapped(route.summary + key), "\n".join(lines)]


def errors_of(route: Route) -> list[int]:
    """The statuses of its errors, but for those of keys."""
    if route.is_work:
        return sorted(_MEANINGS.keys() - {200, *_OF_KEYS})
    return sorted({*route.errors, *((404,) if "{id}" in route.path else ())})
