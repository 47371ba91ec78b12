"""The lines of JSON that a launched engine sends to the client that launched it."""

from __future__ import annotations

import msgspec


class StartReport(msgspec.Struct, frozen=True):
    """Ready (error is absent), or why there will be no engine, with its exit code.

    standing_by: not ready yet: all is loaded, and it waits until nobody serves at its endpoint.
    """

    error: str | None = None
    exit_code: int = 0
    standing_by: bool = False
