"""Limits that all sockets share, and what became of a message that was sent."""

from __future__ import annotations

import enum
from typing import Final

MAX_FRAME_BYTES: Final = 16 * 2**20
MAX_FRAMES: Final = 8
"""Frames of one message that are kept, routing id included; no message of ours has as many."""
MAX_INPUT_BYTES: Final = 2**28
"""Limit of incomplete messages from all peers of an endpoint together."""
MAX_OUTPUT_BYTES: Final = 2**28
"""Limit of unsent messages for all peers of an endpoint together."""
MAX_CONNECTIONS: Final = 2048
MAX_OBSERVERS: Final = 256
"""Connections at an endpoint for KV cache events or their replays."""
PEER_HIGH_WATER_MARK: Final = 128
"""Messages that are kept for one peer. For one that does not read that is 8 MiB of the largest,
64 KiB each."""
BACKLOG: Final = 128  # connections that may wait to be accepted
HANDSHAKE_S: Final = 2.0
LINGER_S: Final = 1.0  # last words reach clients, but not forever


class SendResult(enum.Enum):
    SENT = "sent"
    FULL = "full"  # the client does not read: what waits for it is at the high-water mark
    GONE = "gone"  # no such peer any more
