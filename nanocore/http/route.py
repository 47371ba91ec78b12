"""A line of the table of endpoints; see `routes.ROUTES`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeAlias

import msgspec

from nanocore.http.exchange import Exchange
from nanocore.http.request_record import Operation

Endpoint: TypeAlias = Callable[[Exchange], Awaitable[None]]


class Route(msgspec.Struct, frozen=True):
    """One endpoint.

    path: may hold one {id}, which stands for what is there, slashes included. body: what a request
    brings. is_open: without a key, too. is_work: a server that is shutting down takes no more of
    it. is_anthropic: errors are in Anthropic's shape. operation: what its spans are called; None:
    it has none.
    """

    method: str
    path: str
    endpoint: Endpoint
    body: type[msgspec.Struct] | None = None
    is_open: bool = False
    is_work: bool = False
    is_anthropic: bool = False
    operation: Operation | None = None
