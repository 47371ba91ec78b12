"""The PUB socket of KV cache events: an IpcRouter whose peers subscribe.

A subscription is a message of one frame: 1, or 0 to end it, and a prefix of topics. Subscriptions
per peer are bounded.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from nanocore.protocol.sockets.ipc_router import IpcRouter
from nanocore.protocol.sockets.options import MAX_OBSERVERS, SendResult
from nanocore.protocol.sockets.zmtp import PUB

SUBSCRIBER_HIGH_WATER_MARK: Final = 1000
MAX_SUBSCRIPTIONS: Final = 64  # of one peer
MAX_TOPIC_BYTES: Final = 1024


class PublisherSocket:
    """Belongs to one thread.

    Raises:
        ConfigError: it cannot be bound. AddressInUseError: there is a socket already.
    """

    def __init__(self, path: Path) -> None:
        self.router = IpcRouter(path, PUB, SUBSCRIBER_HIGH_WATER_MARK)
        self.router.limit(MAX_OBSERVERS, math.inf)
        self._topics: dict[bytes, set[bytes]] = {}

    def watch(self, fd: int) -> None:
        """Let `wait` return when this descriptor becomes readable, too."""
        self.router.watch(fd)

    def wait(self, timeout_ms: int) -> set[int]:
        """Sleep until a watched descriptor is ready; take in subscriptions. -1: no limit."""
        ready = self.router.wait(timeout_ms)
        for _ in range(MAX_SUBSCRIPTIONS):
            if (received := self.router.receive()) is None:
                break
            routing_id, frames = received
            self.router.admit(routing_id)
            topics = self._topics.setdefault(routing_id, set())
            action, topic = frames[0][:1], frames[0][1:]
            if action == b"\0":
                topics.discard(topic)
            elif len(topics) < MAX_SUBSCRIPTIONS and len(topic) <= MAX_TOPIC_BYTES:
                topics.add(topic)
        for routing_id in self.router.take_gone():
            self._topics.pop(routing_id, None)
        return ready

    def publish(self, frames: Sequence[bytes]) -> None:
        """Queue a message for subscribers of its topic; those at the high-water mark miss it."""
        for routing_id, topics in list(self._topics.items()):
            if any(frames[0].startswith(topic) for topic in topics):
                if self.router.send(routing_id, frames) is SendResult.GONE:
                    del self._topics[routing_id]

    def close(self) -> None:
        """Send what is queued, for at most a second, and close. Idempotent."""
        self.router.close()
