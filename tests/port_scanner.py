"""A port scanner: what strangers send to a TCP port, and whether they are let go.

Each probe says its bytes, if any, and then listens until the other side hangs up. Nothing that a
probe sends is more than a handshake that cannot succeed, so an engine must deliver none of it and
close every connection by itself.
"""

from __future__ import annotations

import asyncio
import random
import ssl
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Final

_ZMTP3_SIGNATURE: Final = b"\xff" + bytes(7) + b"\x01\x7f"
_MAX_OPEN: Final = (
    200  # connections at once: two descriptors each, if the engine is in this process
)
LEAVE_AT_ONCE: Final = "leaves at once"


def _greeting(mechanism: bytes, as_server: bool = False) -> bytes:
    """A whole ZMTP 3.0 greeting: 64 bytes."""
    return (
        _ZMTP3_SIGNATURE + b"\x03\x00" + mechanism.ljust(20, b"\0") + bytes([as_server] + [0] * 31)
    )


def _command(name: bytes, body: bytes) -> bytes:
    payload = bytes([len(name)]) + name + body
    if len(payload) < 256:
        return b"\x04" + bytes([len(payload)]) + payload
    return b"\x06" + len(payload).to_bytes(8, "big") + payload


def _property(name: bytes, value: bytes) -> bytes:
    return bytes([len(name)]) + name + len(value).to_bytes(4, "big") + value


def _tls_hello() -> bytes:
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    tls = ssl.create_default_context().wrap_bio(incoming, outgoing, server_hostname="localhost")
    try:
        tls.do_handshake()
    except ssl.SSLWantReadError:
        return outgoing.read()
    raise AssertionError("a handshake needs an answer")


def _probes() -> dict[str, bytes]:
    noise = random.Random(5)
    ready = _property(b"Socket-Type", b"DEALER") + _property(b"Identity", b"")
    message = b"\x00\x05hello"
    return {
        "HTTP": b"GET /metrics HTTP/1.1\r\nHost: engine\r\nUser-Agent: scanner\r\n\r\n",
        "TLS hello": _tls_hello(),
        "zeros": bytes(256),
        "one zero": b"\0",
        "random": noise.randbytes(512),
        "random, long": noise.randbytes(100_000),
        "ZMTP 1.0": b"\x01\x00\x06\x00hello",
        "ZMTP 1.0, long form": b"\xff" + (1).to_bytes(8, "big") + b"\x00" + b"\x06\x00hello",
        "ZMTP 2.0": _ZMTP3_SIGNATURE + b"\x01\x05" + b"\x00\x00" + message,
        "ZMTP 3, NULL": _greeting(b"NULL") + _command(b"READY", ready) + message,
        "ZMTP 3, PLAIN": _greeting(b"PLAIN") + _command(b"HELLO", b"\x04user\x04pass") + message,
        "ZMTP 3, PLAIN server": _greeting(b"PLAIN", as_server=True),
        "ZMTP 3, CURVE noise": _greeting(b"CURVE") + _command(b"HELLO", noise.randbytes(194)),
        "ZMTP 3, CURVE initiate": _greeting(b"CURVE") + _command(b"INITIATE", noise.randbytes(257)),
        "ZMTP 3, CURVE message": _greeting(b"CURVE") + _command(b"MESSAGE", noise.randbytes(64)),
        "ZMTP 3, CURVE silence": _greeting(b"CURVE"),
        "half a greeting": _greeting(b"CURVE")[:12],
        "SSH": b"SSH-2.0-OpenSSH_9.6\r\n",
        "silence": b"",
        LEAVE_AT_ONCE: _greeting(b"NULL"),
    }


PROBES: Final = _probes()
"""Name of a probe to the bytes that it sends."""


@dataclass(frozen=True)
class ScanResult:
    """What became of a scan's connections.

    num_closed: those that the other side hung up on. still_open: how many it had not when the time
    was over, by probe. num_refused: connections that could not be made. longest_s: seconds that
    the slowest of the closed ones took.
    """

    num_connections: int
    num_closed: int
    num_refused: int
    longest_s: float
    still_open: dict[str, int] = field(default_factory=dict)


def scan(host: str, port: int, num_connections: int, timeout_s: float = 20.0) -> ScanResult:
    """Connect so many times, with each probe in turn, some hundreds at once.

    timeout_s: how long one connection may stay open.
    """
    return asyncio.run(_scan(host, port, num_connections, timeout_s))


async def _scan(host: str, port: int, num_connections: int, timeout_s: float) -> ScanResult:
    names = list(PROBES)
    places = asyncio.Semaphore(_MAX_OPEN)
    seconds: list[float] = []
    still_open: Counter[str] = Counter()
    num_refused = 0

    async def probe(name: str) -> None:
        nonlocal num_refused
        async with places:
            start_s = time.monotonic()
            try:
                reader, writer = await asyncio.open_connection(host, port)
            except OSError:
                num_refused += 1
                return
            try:
                async with asyncio.timeout(timeout_s):
                    await _visit(reader, writer, name)
                seconds.append(time.monotonic() - start_s)
            except TimeoutError:
                still_open[name] += 1
            finally:
                writer.transport.abort()

    async with asyncio.TaskGroup() as tasks:
        for i in range(num_connections):
            tasks.create_task(probe(names[i % len(names)]))
    return ScanResult(
        num_connections, len(seconds), num_refused, max(seconds, default=0.0), dict(still_open)
    )


async def _visit(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, name: str) -> None:
    """Send the probe and wait until the other side hangs up."""
    try:
        writer.write(PROBES[name])
        if name != LEAVE_AT_ONCE:
            while await reader.read(65536):
                pass
    except ConnectionError:
        pass  # a reset hangs up, too
