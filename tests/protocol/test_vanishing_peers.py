"""A peer that vanishes while the other side is busy: nobody crashes, and nothing sent is lost.

The busy side is a process of its own, because what is at stake is its life: libzmq aborts the whole
process if a ZMTP heartbeat falls due on a connection that has broken while its input was stopped by
the high-water mark (libzmq issues 4364 and 3937, open in 4.3.5).
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager

import pytest

from nanocore.protocol.sockets.client_socket import ClientSocket
from nanocore.protocol.sockets.engine_socket import bind_engine_socket
from nanocore.protocol.sockets.options import SendResult

HEARTBEAT_S = 0.7  # longer than the interval of any heartbeat that the sockets might have
FLOOD = 5000  # more messages than all high-water marks together

BUSY_ENGINE = """
import sys
from nanocore.protocol.sockets.engine_socket import bind_engine_socket
engine = bind_engine_socket(sys.argv[1])
print("ready", flush=True)
sys.stdin.readline()
while engine.receive() is not None: pass
engine.close()
"""

BUSY_CLIENT = """
import asyncio, sys
from nanocore.protocol.sockets.client_socket import ClientSocket
async def main():
    client = ClientSocket(sys.argv[1])
    await client.send([b"hello"])
    print("ready", flush=True)
    sys.stdin.readline()
    client.close()
asyncio.run(main())
"""


@contextmanager
def _busy(script: str, endpoint: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process that reads nothing from its socket until the block ends, and then ends itself."""
    process = subprocess.Popen(
        [sys.executable, "-c", script, endpoint], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with process:
        yield process
        process.communicate(b"go on\n", timeout=30)
    assert process.returncode == 0


def _assert_lives_on(process: subprocess.Popen[bytes]) -> None:
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(HEARTBEAT_S)


def test_a_busy_engine_survives_a_client_that_floods_it_and_vanishes(endpoint: str) -> None:
    async def flood() -> None:
        client = ClientSocket(endpoint)
        await client.send([b"hello"])
        for _ in range(FLOOD):
            client.post([b"\x20", b"\x80"])
        client.close()

    with _busy(BUSY_ENGINE, endpoint) as engine:
        assert engine.stdout is not None
        assert engine.stdout.readline() == b"ready\n"
        asyncio.run(flood())
        _assert_lives_on(engine)


def test_a_busy_client_survives_the_end_of_an_engine_that_has_much_to_say(endpoint: str) -> None:
    engine = bind_engine_socket(endpoint)
    with _busy(BUSY_CLIENT, endpoint) as client:
        assert client.stdout is not None
        assert client.stdout.readline() == b"ready\n"
        engine.wait(10_000)
        message = engine.receive()
        assert message is not None
        results = {engine.send(message[0], [b"\x12", b"\x80"]) for _ in range(FLOOD)}
        assert SendResult.FULL in results
        engine.close()
        _assert_lives_on(client)


def test_an_engines_last_words_reach_a_client_that_reads_them_late(endpoint: str) -> None:
    async def scenario() -> None:
        with closing(ClientSocket(endpoint)) as client:
            with closing(bind_engine_socket(endpoint)) as engine:
                await client.send([b"hello"])
                engine.wait(10_000)
                message = engine.receive()
                assert message is not None
                for word in (b"output", b"and", b"bye"):
                    assert engine.send(message[0], [word]) is SendResult.SENT
            # The engine is gone, and the event loop has had no time to read.
            async with asyncio.timeout(1):
                heard = [await client.receive() for _ in range(3)]
            assert heard == [[b"output"], [b"and"], [b"bye"]]

    asyncio.run(scenario())
