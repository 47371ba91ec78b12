"""What the engine does now, for pages that show it: they ask again and again for what is new."""

from __future__ import annotations

from nanocore.http.errors import bad_request
from nanocore.http.exchange import Exchange
from nanocore.http.live_view import LiveView, live_requests, live_steps
from nanocore.protocol.fields import MAX_EXACT_INT


async def live(exchange: Exchange) -> None:
    """GET /live: steps above `after`, requests, and how things are."""
    after = _after(exchange.query().get("after", "0"))
    client = exchange.client
    recent = await client.recent_steps(after)
    card = client.model_card
    view = LiveView(
        engine=client.engine_instance,
        model=exchange.model_name,
        max_model_len=card.max_model_len,
        num_blocks=card.num_blocks,
        now_s=recent.now_s,
        draining=client.is_draining or exchange.state.is_draining,
        stats=recent.stats,
        steps=live_steps(recent.steps),
        requests=live_requests(recent),
    )
    exchange.reply_headers[b"cache-control"] = b"no-store"
    await exchange.reply_json(view)


def _after(text: str) -> int:
    is_number = text.isascii() and text.isdecimal() and len(text) <= len(str(MAX_EXACT_INT))
    if not is_number or int(text) > MAX_EXACT_INT:
        raise bad_request(
            f"after={text[:40]!r}: the number of the last step that is known, 0 to 2**53 - 1",
            "after",
        )
    return int(text)
