"""Endpoints of stored responses: get, delete, list input items."""

from __future__ import annotations

from typing import Any, Final, Literal

import msgspec

from nanocore.http.exchange import Exchange
from nanocore.http.http_errors import HttpError, bad_request
from nanocore.http.state import StoredResponse

MAX_LISTED: Final = 100
_DEFAULT_LISTED: Final = 20


class ItemList(msgspec.Struct, kw_only=True):
    """A page of input items."""

    object: Literal["list"] = "list"
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool


async def get(exchange: Exchange) -> None:
    stored = _stored(exchange)
    if exchange.query().get("stream", "false").lower() == "true":
        raise bad_request("a stored response cannot be streamed: leave stream out", "stream")
    await exchange.reply(200, stored.body)


async def delete(exchange: Exchange) -> None:
    _stored(exchange)
    exchange.state.responses.remove(exchange.path_id)
    await exchange.reply_json({"id": exchange.path_id, "object": "response", "deleted": True})


async def cancel(exchange: Exchange) -> None:
    _stored(exchange)
    raise bad_request(
        "only background responses can be cancelled, which are not supported: close the connection "
        "to end a response"
    )


async def list_input_items(exchange: Exchange) -> None:
    query = exchange.query()
    items: list[dict[str, Any]] = [*_stored(exchange).input_items]
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise bad_request("order is asc or desc", "order")
    if order == "desc":
        items.reverse()
    limit = query.get("limit", str(_DEFAULT_LISTED))
    if not limit.isdecimal() or len(limit) > 3 or not 1 <= int(limit) <= MAX_LISTED:
        raise bad_request(f"limit is 1 to {MAX_LISTED}", "limit")
    if "after" in query:
        ids = [item["id"] for item in items]
        if query["after"] not in ids:
            raise bad_request("after is the id of one of the items", "after")
        items = items[ids.index(query["after"]) + 1 :]
    page = items[: int(limit)]
    await exchange.reply_json(
        ItemList(
            data=page,
            first_id=page[0]["id"] if page else None,
            last_id=page[-1]["id"] if page else None,
            has_more=len(items) > len(page),
        )
    )


def _stored(exchange: Exchange) -> StoredResponse:
    stored = exchange.state.responses.get(exchange.path_id)
    if stored is None:
        raise HttpError(
            404,
            f"the response {exchange.path_id[:200]!r} is not stored",
            "not_found",
        )
    return stored
