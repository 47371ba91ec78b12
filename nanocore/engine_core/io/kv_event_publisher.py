"""Publishes KV cache events to whoever subscribes, on a thread that alone owns the sockets.

The step loop hands each batch to a bounded queue and never waits: when the queue is full, batches
are dropped and counted, and subscribers see it by the sequence numbers. The thread sleeps in a
poller while there is nothing to do. Should it fail, the engine goes on without it. Salts are
secrets of their owners: only their digest leaves the engine.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from typing import Final

import xxhash

from nanocore.engine_core.io.kv_event_replay import ReplayRing, ReplayServer
from nanocore.kv_cache import events
from nanocore.protocol import kv_events as wire
from nanocore.protocol.codec import unpack_int32
from nanocore.protocol.sockets import MAX_OBSERVERS, IpcRouter, PublisherSocket
from nanocore.system.endpoint_lock import EndpointLock

logger = logging.getLogger(__name__)

MAX_QUEUED_BATCHES: Final = 10_000
_JOIN_TIMEOUT_S: Final = 10.0  # both sockets may linger for a second


class KVEventPublisher(threading.Thread):
    """Binds at construction, serves from `start` to `close`.

    Args:
        endpoint: ipc, for subscribers. replay_endpoint: ipc, for replays; None for no replays.
        topic: first frame of every batch. medium: where the blocks lie.
        max_queued: batches handed over and not yet sent, at most. ring: what can be replayed.
        clock: wall clock, in seconds.

    Attributes:
        num_published, num_dropped: batches since the start.

    Raises:
        ConfigError: an endpoint that cannot be served.
        AddressInUseError: another process, or this one, serves an endpoint already.
    """

    def __init__(
        self,
        endpoint: str,
        replay_endpoint: str | None = None,
        topic: str = "",
        medium: wire.Medium = "GPU",
        max_queued: int = MAX_QUEUED_BATCHES,
        ring: ReplayRing | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        super().__init__(name="kv-events", daemon=True)
        self.num_published = self.num_dropped = 0
        self._topic = topic.encode()
        self._medium = medium
        self._max_queued = max_queued
        self._clock = clock
        self._queue: deque[tuple[float, events.KVEventBatch]] = deque()
        self._num_dropped_now = 0  # in the current episode
        self._ended = False
        self._ring = ReplayRing() if ring is None else ring
        self._replays: ReplayServer | None = None
        with ExitStack() as stack:  # gives back what was taken if a later step fails
            lock = EndpointLock(endpoint, "--kv-events-endpoint")
            stack.callback(lock.release)
            self._socket = PublisherSocket(lock.path)
            stack.callback(self._socket.close)
            if replay_endpoint is not None:
                lock = EndpointLock(replay_endpoint, "--kv-events-replay-endpoint")
                stack.callback(lock.release)
                router = IpcRouter(lock.path)
                stack.callback(router.close)
                router.limit(MAX_OBSERVERS, math.inf)
                self._replays = ReplayServer(router, self._ring, self._topic)
                self._socket.watch(router.fileno())
            self._wake_up = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            self._socket.watch(self._wake_up)
            self._sockets = stack.pop_all()

    @property
    def num_malformed_requests(self) -> int:
        """What came to the replay endpoint and was no request."""
        return self._replays.num_malformed if self._replays else 0

    def publish(self, batch: events.KVEventBatch) -> None:
        """Hand a batch over. For the step loop: never waits; after the end it does nothing."""
        if self._ended:
            return
        if len(self._queue) >= self._max_queued:
            if not self._num_dropped_now:
                logger.warning(
                    "KV events are dropped: %d batches wait to be published", self._max_queued
                )
            self._num_dropped_now += 1
            self.num_dropped += 1
            return
        if self._num_dropped_now:
            logger.warning("KV events go on after %d dropped batches", self._num_dropped_now)
            self._num_dropped_now = 0
        self._queue.append((self._clock(), batch))
        os.eventfd_write(self._wake_up, 1)

    def close(self) -> None:
        """Send what is queued, for at most some seconds, and end. Idempotent."""
        if self._wake_up < 0:
            return
        self._ended = True
        if self.ident is None:
            self._sockets.close()
        else:
            os.eventfd_write(self._wake_up, 1)
            self.join(_JOIN_TIMEOUT_S)
            if self.is_alive():
                logger.error("the KV event thread does not end: leaving it behind")
                return
        os.close(self._wake_up)
        self._wake_up = -1
        logger.info(
            "kv events: %d batches published, %d dropped, %d malformed replay requests",
            self.num_published,
            self.num_dropped,
            self.num_malformed_requests,
        )

    def run(self) -> None:
        """The thread's body. Its failure costs the events, not the engine."""
        try:
            self._serve()
        except Exception:
            logger.exception("the KV event thread failed: no more events are published")
        finally:
            self._ended = True
            self._queue.clear()
            self._sockets.close()

    def _serve(self) -> None:
        timeout_ms = -1
        while True:
            self._socket.wait(timeout_ms)
            ending = self._ended  # before the queue is emptied: nothing is queued after it
            self._send_queued()
            if ending:
                return
            due_s = self._replays.turn(time.monotonic()) if self._replays else None
            timeout_ms = -1 if due_s is None else int(due_s * 1e3)

    def _send_queued(self) -> None:
        try:
            os.eventfd_read(self._wake_up)
        except BlockingIOError:
            return
        # Batches appended from here on have their own wake-up.
        for _ in range(len(self._queue)):
            ts, batch = self._queue.popleft()
            payload = wire.encode_batch(wire_batch(batch, ts, self._medium))
            self._socket.publish(wire.event_frames(self._topic, batch.sequence, payload))
            if self._replays is not None:
                self._ring.append(batch.sequence, payload)
            self.num_published += 1


def wire_batch(batch: events.KVEventBatch, ts: float, medium: wire.Medium) -> wire.KVEventBatch:
    """A batch as it is published. ts: wall clock, in seconds."""
    return wire.KVEventBatch(ts, [_wire_event(event, medium) for event in batch.events], None)


def _wire_event(
    event: events.KVEvent, medium: wire.Medium
) -> wire.BlockStored | wire.BlockRemoved | wire.AllBlocksCleared:
    match event:
        case events.BlockStored(parent_block_hash=parent):
            return wire.BlockStored(
                block_hashes=[_wire_hash(digest) for digest in event.block_hashes],
                parent_block_hash=None if parent is None else _wire_hash(parent),
                token_ids=unpack_int32(event.token_ids).tolist(),
                block_size=event.block_size,
                lora_id=None,
                medium=medium,
                lora_name=None,
                extra_keys=_wire_extra_keys(event),
            )
        case events.BlockRemoved():
            return wire.BlockRemoved([_wire_hash(digest) for digest in event.block_hashes], medium)
        case events.AllBlocksCleared():
            return wire.AllBlocksCleared()


def _wire_hash(digest: bytes) -> int:
    """The low 64 bits, as vLLM publishes them."""
    return int.from_bytes(digest[-8:], "big")


def _wire_extra_keys(event: events.BlockStored) -> list[list[str] | None] | None:
    if not event.extra_keys:
        return None
    digest = xxhash.xxh3_128_hexdigest(event.extra_keys)
    return [[digest], *[None] * (len(event.block_hashes) - 1)]
