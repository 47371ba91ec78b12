"""`python -m nanocore.cli.serve.http_worker FD`: one of several HTTP processes.

FD is a socket to the parent (`worker_pool`), which sends the settings. The worker ends when the
socket closes; the kernel kills it when the parent dies.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
from typing import Final, NoReturn

import msgspec
import uvloop

from nanocore.cli.serve.worker_pool import WorkerStart
from nanocore.http.server.service import HttpService
from nanocore.http.server_settings import EngineAddress
from nanocore.protocol.errors import NanocoreError, StartError
from nanocore.system.child_process import signal_at_parent_death
from nanocore.system.logs import start_log

logger = logging.getLogger(__name__)

CONNECT_TIMEOUT_S: Final = 10.0
RETRY_S: Final = 1.0
MAX_LINE_BYTES: Final = 2**22


async def _line(parent: asyncio.StreamReader) -> bytes:
    """Return the parent's next line; exit if it has closed the socket."""
    line = await parent.readline()
    if not line.endswith(b"\n"):
        os._exit(StartError.exit_code)
    return line


async def _serve(link: socket.socket) -> None:
    parent, to_parent = await asyncio.open_unix_connection(sock=link, limit=MAX_LINE_BYTES)
    ending = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, ending.set)
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the parent decides when it ends
    start = msgspec.json.decode(await _line(parent), type=WorkerStart)
    start_log(f"serve worker {start.number}", start.log_format)
    service = HttpService(start.app, start.server)
    await service.start([socket.socket(fileno=fd) for fd in start.fds])
    hearing = asyncio.create_task(_hear(parent, to_parent, service))
    await ending.wait()
    try:
        if not await service.drain(start.shutdown_timeout_s):
            logger.info("some responses were incomplete after the timeout and were cut")
    finally:
        hearing.cancel()
        await service.close()


async def _hear(
    parent: asyncio.StreamReader, to_parent: asyncio.StreamWriter, service: HttpService
) -> None:
    """Connect to the engine once its address arrives, and wait for the parent's end."""
    try:
        engine = msgspec.json.decode(await _line(parent), type=EngineAddress)
        said = ""
        while True:
            try:
                await service.connect(engine, CONNECT_TIMEOUT_S)
                break
            except NanocoreError as error:
                if str(error) != said:
                    said = str(error)
                    logger.error("%s; trying again", said)
                await asyncio.sleep(RETRY_S)
        to_parent.write(b"s")
        await _line(parent)
    except Exception:
        logger.exception("internal error")
        os._exit(StartError.exit_code)


def main() -> NoReturn:
    signal_at_parent_death(signal.SIGKILL)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(socket.socket(fileno=int(sys.argv[1]))))
    sys.exit(0)


if __name__ == "__main__":
    main()
