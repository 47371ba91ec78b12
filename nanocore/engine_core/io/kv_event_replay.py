"""Replays of KV cache events: the batches of late, kept for subscribers that missed some.

Runs on the publisher's thread. What a client has not yet taken is a position in the ring, not a
queue, so a client that does not read costs its socket's high-water mark and no more; one that takes
nothing for a while loses its replay. Requests that are none are counted and get no answer.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections import deque
from dataclasses import dataclass
from itertools import islice
from typing import Final

from nanocore.protocol.errors import ProtocolError
from nanocore.protocol.kv_events import replay_end_frames, replay_frames, replay_start
from nanocore.protocol.sockets import IpcRouter, SendResult

logger = logging.getLogger(__name__)

MAX_RING_BATCHES: Final = 10_000
MAX_RING_BYTES: Final = 64 * 2**20
REPLAY_TIMEOUT_S: Final = 30.0
REPLAY_RETRY_S: Final = 0.05
_MAX_REQUESTS: Final = 256  # taken from the socket before events get their turn
_MAX_BURST: Final = 256  # batches for one client before the others get their turn


class ReplayRing:
    """The last payloads by sequence number; the oldest go when either limit is passed."""

    def __init__(
        self, max_batches: int = MAX_RING_BATCHES, max_bytes: int = MAX_RING_BYTES
    ) -> None:
        self._max_batches, self._max_bytes = max_batches, max_bytes
        self._entries: deque[tuple[int, bytes]] = deque()
        self._num_bytes = 0

    @property
    def last(self) -> int:
        """The newest sequence number; -1 if there is none."""
        return self._entries[-1][0] if self._entries else -1

    def append(self, sequence: int, payload: bytes) -> None:
        """Keep a batch; its number is higher than all before."""
        self._entries.append((sequence, payload))
        self._num_bytes += len(payload)
        while len(self._entries) > self._max_batches or self._num_bytes > self._max_bytes:
            self._num_bytes -= len(self._entries.popleft()[1])

    def between(self, start: int, end: int, limit: int) -> list[tuple[int, bytes]]:
        """(sequence number, payload) of the first batches from `start` up to `end` - 1."""
        first = bisect_left(self._entries, start, key=_sequence_of)
        last = bisect_left(self._entries, end, key=_sequence_of)
        return list(islice(self._entries, first, min(last, first + limit)))


def _sequence_of(entry: tuple[int, bytes]) -> int:
    return entry[0]


@dataclass(slots=True)
class _Replay:
    """One client's request: the batches from `next` up to `end` - 1."""

    next: int
    end: int
    since_s: float  # when the client last took something


class ReplayServer:
    """Answers replay requests out of a ring, a burst per client and turn.

    num_malformed: requests that were none. num_given_up: replays that nobody took.
    """

    def __init__(self, socket: IpcRouter, ring: ReplayRing, topic: bytes) -> None:
        self._socket = socket
        self._topic = topic
        self._ring = ring
        self._replays: dict[bytes, _Replay] = {}
        self.num_malformed = 0
        self.num_given_up = 0

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
                    self.num_given_up += 1
                    logger.warning("a KV event replay was given up: its client does not read")
        return min(waits_s, default=None)

    def _take_requests(self, now_s: float) -> bool:
        """Note new requests; whether there may be more. A client's new one replaces its last."""
        for _ in range(_MAX_REQUESTS):
            received = self._socket.receive()
            if received is None:
                return self._socket.is_busy
            routing_id, frames = received
            try:
                start = replay_start(frames)
            except ProtocolError:
                self.num_malformed += 1
            else:
                # Up to what is there now: later batches reach the client as a subscriber.
                self._replays[routing_id] = _Replay(start, self._ring.last + 1, now_s)
        return True

    def _burst(self, routing_id: bytes, replay: _Replay, now_s: float) -> SendResult | None:
        """Send a client some of what it lacks. None: all of it was taken, and there is more."""
        for sequence, payload in self._ring.between(replay.next, replay.end, _MAX_BURST):
            result = self._socket.send(routing_id, replay_frames(self._topic, sequence, payload))
            if result is not SendResult.SENT:
                return result
            replay.next, replay.since_s = sequence + 1, now_s
        if self._ring.between(replay.next, replay.end, 1):
            return None
        return self._socket.send(routing_id, replay_end_frames())
