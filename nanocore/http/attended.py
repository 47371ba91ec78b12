"""Work for a client that is given up when the client leaves: what generates has a Delivery."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

from nanocore.client.requests.submission import SubmitTicket
from nanocore.http.exchange import Disconnected, Exchange

Result = TypeVar("Result")


async def attended(exchange: Exchange, work: Coroutine[Any, Any, Result]) -> Result:
    """What this work returns; its body must have been read.

    Raises:
        Disconnected: the client has left, and the work is cancelled; and what it raises.
    """
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_left(exchange))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise Disconnected
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def attended_aside(
    exchange: Exchange, tickets: Sequence[SubmitTicket], work: Coroutine[Any, Any, Result]
) -> Result:
    """As `attended`, for work on much text: the requests that wait for it let others pass."""
    for ticket in tickets:
        ticket.give_way()
    return await attended(exchange, work)


async def _left(exchange: Exchange) -> None:
    while (await exchange.receive())["type"] != "http.disconnect":
        pass  # more of a body is of no interest
