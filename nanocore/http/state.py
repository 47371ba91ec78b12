"""What all requests of a server process share."""

from __future__ import annotations

from datetime import UTC, datetime
from functools import cached_property

from nanocore.client import AsyncEngineClient
from nanocore.http.delivery_loop import DeliveryLoop
from nanocore.http.freed_memory import FreedMemory
from nanocore.http.request_record import RecordWriter
from nanocore.http.response_store import ResponseStore
from nanocore.http.settings import AppSettings


class ServerState:
    """client: the engine's, once it serves. is_draining: no new requests are taken.

    started: when the process was. responses: answers that clients may ask for again. spans: who is
    told of requests that have ended, if anybody is.
    """

    def __init__(self, settings: AppSettings) -> None:
        self.settings = settings
        self.client: AsyncEngineClient | None = None
        self.spans: RecordWriter | None = None
        self.is_draining = False
        self.started = datetime.now(UTC)
        self.freed_memory = FreedMemory()
        self.responses = ResponseStore(settings.stored_responses_bytes)

    @cached_property
    def deliveries(self) -> DeliveryLoop:
        """The loop that drives all streams; in the event loop of the first request."""
        return DeliveryLoop(self.settings.keep_alive_s)
