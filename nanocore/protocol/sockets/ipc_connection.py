"""IpcConnection: one peer of an IpcRouter; its socket, what it sends, and what waits for it.

Owned by the router, which decides when to read, to write and to hang up. Nothing here blocks.
"""

from __future__ import annotations

import socket
from collections import deque

from nanocore.protocol.sockets.zmtp import Buffer, Role, ZmtpReader


class IpcConnection:
    """A connection just accepted; the greeting waits to be written.

    num_bytes: of its unfinished message, when it was last looked at. num_unsent_bytes: of what
    waits for it. has_more: the last read left
    something behind. is_queued: it is among those to be looked at. waits_for_room: the poller is to
    say when the peer takes more.
    """

    __slots__ = (
        "fd", "has_more", "is_queued", "num_bytes", "num_unsent_bytes", "reader", "routing_id",
        "socket", "unsent", "waits_for_room",
    )  # fmt: skip

    def __init__(self, accepted: socket.socket, routing_id: bytes, role: Role) -> None:
        accepted.setblocking(False)
        self.socket = accepted
        self.fd = accepted.fileno()
        self.routing_id = routing_id
        self.reader = ZmtpReader(role)
        self.num_bytes = 0
        self.num_unsent_bytes = len(role.greeting)
        self.has_more = self.is_queued = self.waits_for_room = False
        self.unsent: deque[list[Buffer]] = deque([[role.greeting]])

    def read(self, scratch: memoryview) -> bool:
        """Take in what has come; False if there was nothing.

        Raises:
            OSError: the peer is gone.
        """
        try:
            num_bytes = self.socket.recv_into(scratch)
        except BlockingIOError:
            self.has_more = False
            return False
        if not num_bytes:
            raise ConnectionResetError
        self.has_more = num_bytes == len(scratch)
        self.reader.feed(scratch[:num_bytes])
        return True

    def append(self, buffers: list[Buffer]) -> int:
        """Let a message wait for the peer; returns its bytes."""
        num_bytes = sum(map(len, buffers))
        self.unsent.append(buffers)
        self.num_unsent_bytes += num_bytes
        return num_bytes

    def write(self) -> None:
        """Send what the peer takes now.

        Raises:
            OSError: the peer is gone.
        """
        unsent = self.unsent
        while unsent:
            buffers = unsent[0]
            try:
                num_sent = self.socket.sendmsg(buffers)
            except BlockingIOError:
                return
            self.num_unsent_bytes -= num_sent
            while buffers and num_sent >= len(buffers[0]):
                num_sent -= len(buffers.pop(0))
            if buffers:
                buffers[0] = memoryview(buffers[0])[num_sent:]
            else:
                unsent.popleft()
