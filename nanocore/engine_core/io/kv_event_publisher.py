"""Publishes and replays KV cache events on a thread that alone owns the sockets.

The step loop hands each batch to a bounded queue and never waits: when the queue is full, batches
are dropped, and subscribers see gaps in the sequence numbers. A replay client's
progress is a position in a ring, not a queue, so one that does not read costs its socket's
high-water mark and no more; one that takes nothing for a while loses its replay. If the thread
fails, the engine continues without it. Salts are secrets of their owners: only their digest leaves
the engine.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from itertools import islice
from operator import itemgetter
from pathlib import Path
from typing import Final

import msgspec
import xxhash

from nanocore.engine_core.waking_queue import WakingQueue
from nanocore.kv_cache import events
from nanocore.protocol import kv_events as wire
from nanocore.protocol.codec import unpack_int32
from nanocore.protocol.errors import ProtocolError
from nanocore.protocol.kv_events import replay_end_frames, replay_frames, replay_start
from nanocore.protocol.sockets.ipc_router import IpcRouter
from nanocore.protocol.sockets.options import MAX_OBSERVERS, SendResult
from nanocore.protocol.sockets.zmtp import PUB
from nanocore.system.endpoint_lock import EndpointLock

logger = logging.getLogger(__name__)

MAX_RING_BATCHES: Final = 10_000
MAX_RING_BYTES: Final = 64 * 2**20
REPLAY_TIMEOUT_S: Final = 30.0
REPLAY_RETRY_S: Final = 0.05
_MAX_REQUESTS: Final = 256  # taken from the socket before events get their turn
_MAX_BURST: Final = 256  # batches for one client before the others get their turn
MAX_QUEUED_BATCHES: Final = 10_000
_JOIN_TIMEOUT_S: Final = 10.0  # both sockets may linger for a second
SUBSCRIBER_HIGH_WATER_MARK: Final = 1000
MAX_SUBSCRIPTIONS: Final = 64  # of one peer
MAX_TOPIC_BYTES: Final = 1024


class KVEventPublisher(threading.Thread):
    """Binds at construction, serves from `start` to `close`.

    Args:
        endpoint: ipc, for subscribers. replay_endpoint: ipc, for replays; None: no replays.
        topic: first frame of every batch. medium: where the blocks lie.
        clock: wall clock, in seconds.

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
        clock: Callable[[], float] = time.time,
    ) -> None:
        super().__init__(name="kv-events", daemon=True)
        self._topic = topic.encode()
        self._medium = medium
        self._clock = clock
        self._num_dropped = 0  # in the current episode
        self._ended = False
        self._ring = ReplayRing()
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
            self._queue = WakingQueue[tuple[float, events.KVEventBatch] | None]()
            self._socket.watch(self._queue.fd)
            self._sockets = stack.pop_all()

    def publish(self, batch: events.KVEventBatch) -> None:
        """Queue a batch; never waits. For the step loop; after the end it does nothing."""
        if self._ended:
            return
        if len(self._queue) >= MAX_QUEUED_BATCHES:
            if not self._num_dropped:
                text = "KV events are dropped: %d batches wait to be published"
                logger.warning(text, MAX_QUEUED_BATCHES)
            self._num_dropped += 1
            return
        if self._num_dropped:
            logger.warning("KV events resume after %d dropped batches", self._num_dropped)
            self._num_dropped = 0
        self._queue.put((self._clock(), batch))

    def close(self) -> None:
        """Send what is queued, for at most some seconds, and end. Idempotent."""
        self._ended = True
        if self.ident is None:
            self._sockets.close()
        elif self.is_alive():
            self._queue.put(None)
            self.join(_JOIN_TIMEOUT_S)
            if self.is_alive():
                logger.error("the KV event thread does not end: abandoning it")

    def run(self) -> None:
        """Serve. A failure ends the events, not the engine."""
        try:
            self._serve()
        except Exception:
            logger.exception("the KV event thread failed: no more events are published")
        finally:
            self._ended = True
            self._sockets.close()

    def _serve(self) -> None:
        timeout_ms = -1
        while True:
            self._socket.wait(timeout_ms)
            for entry in self._queue.drain():
                if entry is None:
                    return
                self._send(*entry)
            due_s = self._replays.turn(time.monotonic()) if self._replays else None
            timeout_ms = -1 if due_s is None else int(due_s * 1e3)

    def _send(self, ts: float, batch: events.KVEventBatch) -> None:
        payload = wire.encode_batch(wire_batch(batch, ts, self._medium))
        self._socket.publish(wire.event_frames(self._topic, batch.sequence, payload))
        if self._replays is not None:
            self._ring.append(batch.sequence, payload)


def wire_batch(batch: events.KVEventBatch, ts: float, medium: wire.Medium) -> wire.KVEventBatch:
    """Convert a batch to the wire's. ts: wall clock, in seconds."""
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
                group_idx=event.group,
            )
        case events.BlockRemoved(block_hashes, group):
            return wire.BlockRemoved([_wire_hash(digest) for digest in block_hashes], medium, group)
        case events.AllBlocksCleared():
            return wire.AllBlocksCleared()


def _wire_hash(digest: bytes) -> int:
    """Return the low 64 bits, as vLLM publishes them."""
    return int.from_bytes(digest[-8:], "big")


def _wire_extra_keys(event: events.BlockStored) -> list[list[str] | None] | None:
    if not event.extra_keys:
        return None
    digest = xxhash.xxh3_128_hexdigest(event.extra_keys)
    return [[digest], *[None] * (len(event.block_hashes) - 1)]


class ReplayRing:
    """The latest payloads by sequence number; above either limit the oldest are dropped."""

    def __init__(self) -> None:
        self._entries: deque[tuple[int, bytes]] = deque()
        self._num_bytes = 0

    @property
    def last(self) -> int:
        """Newest sequence number; -1 if there is none."""
        return self._entries[-1][0] if self._entries else -1

    def append(self, sequence: int, payload: bytes) -> None:
        """Keep a batch, whose number is higher than all before."""
        self._entries.append((sequence, payload))
        self._num_bytes += len(payload)
        while len(self._entries) > MAX_RING_BATCHES or self._num_bytes > MAX_RING_BYTES:
            self._num_bytes -= len(self._entries.popleft()[1])

    def between(self, start: int, end: int, limit: int) -> list[tuple[int, bytes]]:
        """Return (sequence number, payload) of `limit` batches or fewer, from start to end - 1."""
        first = bisect_left(self._entries, start, key=itemgetter(0))
        last = bisect_left(self._entries, end, key=itemgetter(0))
        return list(islice(self._entries, first, min(last, first + limit)))


class _Replay(msgspec.Struct):
    """A client's request for the batches from `next` up to `end` - 1."""

    next: int
    end: int
    since_s: float  # when the client last took something


class ReplayServer:
    """Answers replay requests from a ring, a burst per client and turn."""

    def __init__(self, socket: IpcRouter, ring: ReplayRing, topic: bytes) -> None:
        self._socket = socket
        self._topic = topic
        self._ring = ring
        self._replays: dict[bytes, _Replay] = {}

    def turn(self, now_s: float) -> float | None:
        """Take requests and send what clients take now.

        Returns the seconds until the next turn is due, or None if only a request makes it due.
        """
        waits_s = [0.0] if self._take_requests(now_s) else []
        for routing_id, replay in list(self._replays.items()):
            result = self._burst(routing_id, replay, now_s)
            if result is None:
                waits_s.append(0.0)
            elif result is SendResult.FULL and now_s - replay.since_s <= REPLAY_TIMEOUT_S:
                waits_s.append(REPLAY_RETRY_S)
            else:
                del self._replays[routing_id]
                if result is SendResult.FULL:
                    logger.warning("a KV event replay was abandoned: its client does not read")
        return min(waits_s, default=None)

    def _take_requests(self, now_s: float) -> bool:
        """Note new requests, each replacing its client's last; return whether there may be more."""
        for _ in range(_MAX_REQUESTS):
            received = self._socket.receive()
            if received is None:
                return self._socket.is_busy
            routing_id, frames = received
            with suppress(ProtocolError):  # one that is malformed gets no reply
                start = replay_start(frames)
                # Up to what is there now: later batches reach the client as a subscriber.
                self._replays[routing_id] = _Replay(start, self._ring.last + 1, now_s)
        return True

    def _burst(self, routing_id: bytes, replay: _Replay, now_s: float) -> SendResult | None:
        """Send a client some missing batches. Returns None if all were taken and there are more."""
        for sequence, payload in self._ring.between(replay.next, replay.end, _MAX_BURST):
            result = self._socket.send(routing_id, replay_frames(self._topic, sequence, payload))
            if result is not SendResult.SENT:
                return result
            replay.next, replay.since_s = sequence + 1, now_s
        if self._ring.between(replay.next, replay.end, 1):
            return None
        return self._socket.send(routing_id, replay_end_frames())


class PublisherSocket(IpcRouter):
    """The PUB socket: its peers subscribe. Belongs to one thread.

    A subscription is a message of one frame: 1, or 0 to end it, and a prefix of topics.

    Raises:
        ConfigError: it cannot be bound. AddressInUseError: there is a socket already.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path, PUB, SUBSCRIBER_HIGH_WATER_MARK)
        self.limit(MAX_OBSERVERS, math.inf)
        self._topics: dict[bytes, set[bytes]] = {}

    def wait(self, timeout_ms: int) -> set[int]:
        """Sleep until a watched descriptor is ready; take in subscriptions. -1: no limit."""
        ready = super().wait(timeout_ms)
        for _ in range(MAX_SUBSCRIPTIONS):
            if (received := self.receive()) is None:
                break
            routing_id, frames = received
            self.admit(routing_id)
            topics = self._topics.setdefault(routing_id, set())
            action, topic = frames[0][:1], frames[0][1:]
            if action == b"\0":
                topics.discard(topic)
            elif len(topics) < MAX_SUBSCRIPTIONS and len(topic) <= MAX_TOPIC_BYTES:
                topics.add(topic)
        for routing_id in self.take_gone():
            self._topics.pop(routing_id, None)
        return ready

    def publish(self, frames: Sequence[bytes]) -> None:
        """Queue a message for subscribers of its topic; those at the high-water mark miss it."""
        for routing_id, topics in list(self._topics.items()):
            if any(frames[0].startswith(topic) for topic in topics):
                if self.send(routing_id, frames) is SendResult.GONE:
                    del self._topics[routing_id]
