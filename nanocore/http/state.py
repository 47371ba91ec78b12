"""ServerState: the objects that all requests of a server process share.

They are the delivery loop, which drives all streams; the store of /v1/responses; and the trimmer,
which returns freed memory to the system.
"""

from __future__ import annotations

import asyncio
import ctypes
from collections import OrderedDict
from collections.abc import Callable
from datetime import UTC, datetime
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, Protocol

import msgspec

from nanocore.client import AsyncEngineClient
from nanocore.http.http_errors import HttpError
from nanocore.http.server_settings import AppSettings

if TYPE_CHECKING:
    from nanocore.http.request_spans import SpanWriter

LARGE_BYTES: Final = 1 << 18
TRIM_DELAY_S: Final = 1.0
"""Delay that lets further requests end first, because a trim takes some 20 ms in a thread."""


class ServerState:
    """State of one process.

    client: the engine client, once it is connected. is_draining: no new requests are accepted.
    started: start of the process. responses: stored responses. spans: writer of request spans.
    """

    def __init__(self, settings: AppSettings) -> None:
        self.settings = settings
        self.client: AsyncEngineClient | None = None
        self.spans: SpanWriter | None = None
        self.is_draining = False
        self.started = datetime.now(UTC)
        self.memory = MemoryTrimmer()
        self.responses = ResponseStore(settings.stored_responses_bytes)

    @cached_property
    def deliveries(self) -> DeliveryLoop:
        # Made by the first request, because it belongs to the event loop of the requests.
        return DeliveryLoop(self.settings.keep_alive_s)


class Deliverable(Protocol):
    """A stream that the loop drives; see `Delivery`."""

    def step(self) -> None: ...

    def tick(self) -> None: ...

    def fail(self, error: HttpError) -> None: ...


class DeliveryLoop:
    """Drives all streams of an event loop with one callback per engine message.

    A stream with new tokens joins a list. In the next iteration of the event loop all of them are
    read, encoded and written, so no task is woken for a token.

    Args:
        keep_alive_s: streams that were silent for this long send a keep-alive.
    """

    def __init__(self, keep_alive_s: float) -> None:
        self._loop = asyncio.get_running_loop()
        self._ready: list[Deliverable] = []
        self._open: set[Deliverable] = set()
        self._half_s = keep_alive_s / 2
        self._timer: asyncio.TimerHandle | None = None

    @property
    def is_busy(self) -> bool:
        return bool(self._open)

    def add(self, delivery: Deliverable) -> None:
        self._open.add(delivery)
        if self._timer is None:
            self._timer = self._loop.call_later(self._half_s, self._tick)

    def remove(self, delivery: Deliverable) -> None:
        self._open.discard(delivery)
        if not self._open and self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def wake(self, delivery: Deliverable) -> None:
        """Schedule this delivery's `step` for the next iteration of the event loop."""
        if not self._ready:
            self._loop.call_soon(self._run)
        self._ready.append(delivery)

    def fail_all(self, error: HttpError) -> None:
        for delivery in list(self._open):
            delivery.fail(error)

    def _run(self) -> None:
        # Swap the list first: a step that wakes its delivery again means the next iteration.
        ready, self._ready = self._ready, []
        for delivery in ready:
            delivery.step()

    def _tick(self) -> None:
        # Deliveries detect silence between two ticks, so ticks come at half the interval.
        self._timer = self._loop.call_later(self._half_s, self._tick)
        for delivery in list(self._open):
            delivery.tick()


class StoredResponse(msgspec.Struct, frozen=True):
    """A response of /v1/responses.

    body: the response object as JSON. items: the whole conversation, input and output, as input
    items.
    """

    body: bytes
    items: list[Any]


class ResponseStore:
    """Responses that clients may retrieve or continue: in memory, bounded, least recently used
    first out.

    A server with several processes stores none, because the next request may reach another process.

    Args:
        limit_bytes: for all of them together; 0 stores none.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._num_bytes = 0
        self._stored: OrderedDict[str, tuple[StoredResponse, int]] = OrderedDict()

    @property
    def is_on(self) -> bool:
        return self._limit_bytes > 0

    def put(self, response_id: str, response: StoredResponse) -> None:
        """Store a response and evict others to make room; one larger than the limit is dropped."""
        num_bytes = len(response.body) + len(msgspec.json.encode(response.items))
        self.remove(response_id)
        if num_bytes > self._limit_bytes:
            return
        self._stored[response_id] = (response, num_bytes)
        self._num_bytes += num_bytes
        while self._num_bytes > self._limit_bytes:
            _, (_, old_bytes) = self._stored.popitem(last=False)
            self._num_bytes -= old_bytes

    def get(self, response_id: str) -> StoredResponse | None:
        """Return the response, which becomes the most recently used."""
        entry = self._stored.get(response_id)
        if entry is None:
            return None
        self._stored.move_to_end(response_id)
        return entry[0]

    def remove(self, response_id: str) -> None:
        self._num_bytes -= self._stored.pop(response_id, (None, 0))[1]


# Only glibc has it.
trim: Final[Callable[[int], int]] = getattr(ctypes.CDLL(None), "malloc_trim", lambda _: 0)


class MemoryTrimmer:
    """Returns memory of large bodies to the system.

    glibc has an arena per tokenizing thread, and only trims the first one itself.
    """

    def __init__(self) -> None:
        self._is_due = False

    def note(self, num_bytes: int) -> None:
        """Schedule a trim after a request whose body was large."""
        if num_bytes >= LARGE_BYTES and not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_later(TRIM_DELAY_S, self._trim)

    def _trim(self) -> None:
        self._is_due = False
        asyncio.get_running_loop().run_in_executor(None, trim, 0)
