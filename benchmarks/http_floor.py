"""The least that a stream costs: a server on uvloop that writes given bytes, and does nothing else.

    NO_MODEL_PACE=pace python benchmarks/http_floor.py PORT

A request's body says what its answer's chunks are, and how many: one is written to every stream at
each tick of the pace.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import cast

import uvloop
from no_model import Pace

_HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"


class _Stream(asyncio.Protocol):
    """A connection with one request. all_streams: those that are being answered."""

    def __init__(self, all_streams: set[_Stream]) -> None:
        self._all = all_streams
        self._received = b""
        self.chunk, self.num_left = b"", 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.write = cast("asyncio.Transport", transport).write

    def data_received(self, data: bytes) -> None:
        self._received += data
        head, _, body = self._received.partition(b"\r\n\r\n")
        if len(body) >= int(head.partition(b"Content-Length: ")[2]):
            request = json.loads(body)
            self.chunk, self.num_left = request["chunk"].encode(), request["num"]
            self.write(_HEAD)
            self._all.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._all.discard(self)


async def _serve(port: int) -> None:
    streams: set[_Stream] = set()
    loop, pace = asyncio.get_running_loop(), Pace()
    await loop.create_server(lambda: _Stream(streams), "127.0.0.1", port)
    while True:
        await asyncio.sleep(pace.delay_s() if streams else 0.01)
        ended = []
        for one in streams:
            one.write(one.chunk)
            one.num_left -= 1
            if one.num_left == 0:
                one.write(b"0\r\n\r\n")
                ended.append(one)
        streams.difference_update(ended)


if __name__ == "__main__":
    uvloop.run(_serve(int(sys.argv[1])))
