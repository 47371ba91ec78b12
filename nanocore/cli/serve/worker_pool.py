"""WorkerPool: several HTTP processes, restarted when they die.

Each worker has its own listening sockets, which stay open here, so clients that connect while it is
replaced wait for the next one. A worker gets its settings and the engine's address over a socket
pair, on which it reports that it serves; each side ends when the pair closes.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Final

import msgspec
from msgspec.structs import asdict

from nanocore.client import AsyncEngineClient
from nanocore.http.server.service import freeze_startup
from nanocore.http.server_settings import AppSettings, EngineAddress, ServerSettings
from nanocore.protocol.errors import EngineDeadError
from nanocore.protocol.messages import ModelCard
from nanocore.system.child_process import module_command
from nanocore.system.logs import LogFormat

if TYPE_CHECKING:
    from nanocore.cli.serve.flags import ServeOptions

logger = logging.getLogger(__name__)

COMMAND: Final = module_command("nanocore.cli.serve.http_worker")
FIRST_PAUSE_S: Final = 0.1
MAX_PAUSE_S: Final = 10.0
"""Longest pause before a worker is restarted, reached by doubling."""
GRACE_S: Final = 3.0
"""Time for workers to exit after the timeout of their responses."""


class WorkerStart(msgspec.Struct, frozen=True, kw_only=True):
    """First line to a worker. fds: of its listening sockets."""

    app: AppSettings
    server: ServerSettings
    shutdown_timeout_s: float
    fds: tuple[int, ...]
    number: int
    log_format: LogFormat


class _Worker:
    def __init__(self, sockets: Sequence[socket.socket]) -> None:
        self.began_s = time.monotonic()
        self.serves = asyncio.Event()
        self._link, worker_end = socket.socketpair()
        fds = [worker_end.fileno(), *(sock.fileno() for sock in sockets)]
        with worker_end:
            # In its own session Ctrl-C does not reach it, so this process can shut it down in
            # order.
            self.process = subprocess.Popen(
                [*COMMAND, str(worker_end.fileno())],
                pass_fds=fds,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        self.fds = tuple(fds[1:])

    async def run(self, start: WorkerStart, engine: asyncio.Future[EngineAddress]) -> int:
        """Send the settings, and the engine's address once it is known; return the exit code."""
        heard, told = await asyncio.open_unix_connection(sock=self._link)

        def tell(message: msgspec.Struct) -> None:
            told.write(msgspec.json.encode(message) + b"\n")

        def introduce(known: asyncio.Future[EngineAddress]) -> None:
            tell(known.result())

        tell(start)
        engine.add_done_callback(introduce)
        with suppress(OSError):
            while await heard.read(64):
                self.serves.set()
        engine.remove_done_callback(introduce)
        told.close()
        return await asyncio.to_thread(self.process.wait)


class WorkerPool:
    """The workers of a server with these options."""

    def __init__(self, options: ServeOptions) -> None:
        self._new_start = partial(
            WorkerStart,
            app=options.app,
            server=options.server,
            shutdown_timeout_s=options.shutdown_timeout_s,
            log_format=options.log_format,
        )
        self._sockets: list[list[socket.socket]] = []
        self._engine: asyncio.Future[EngineAddress]
        self._workers: dict[int, _Worker] = {}
        self._keepers: list[asyncio.Task[None]] = []
        self._is_ending = asyncio.Event()

    async def start(self, sockets: list[list[socket.socket]]) -> None:
        """Start one worker per list of sockets."""
        self._sockets = sockets
        self._engine = asyncio.get_running_loop().create_future()
        self._keepers = [
            asyncio.create_task(self._keep(number)) for number in range(len(self._sockets))
        ]

    async def connect(self, engine: EngineAddress, timeout_s: float) -> ModelCard:
        """Connect every worker to the engine.

        Raises:
            NanocoreError: see `AsyncEngineClient.connect`.
        """
        client = AsyncEngineClient.connect(**asdict(engine), timeout_s=timeout_s)
        async with client:  # reports errors here, once
            card = client.model_card
        self._engine.set_result(engine)
        try:
            async with asyncio.timeout(timeout_s):
                for number in range(len(self._sockets)):
                    await self._worker_serves(number)
        except TimeoutError:
            raise EngineDeadError(
                f"{len(self._sockets)} HTTP workers did not reach the engine in {timeout_s:g} s"
            ) from None
        freeze_startup()
        return card

    @property
    def is_idle(self) -> bool:
        """See `HttpService.is_idle`; only the workers know."""
        return False

    async def drain(self, timeout_s: float) -> bool:
        """Let workers finish their responses and exit; return whether all did in time."""
        self._is_ending.set()
        for sock in (sock for of_worker in self._sockets for sock in of_worker):
            sock.close()  # the workers' copies stay open
        self._signal(signal.SIGTERM)
        if self._keepers:
            await asyncio.wait(self._keepers, timeout=timeout_s + GRACE_S)
        return all(
            keeper.done() and worker.process.returncode == 0
            for keeper, worker in zip(self._keepers, self._workers.values(), strict=False)
        )

    async def close(self) -> None:
        """Kill the remaining workers. Idempotent."""
        self._is_ending.set()
        self._signal(signal.SIGKILL)
        await asyncio.gather(*self._keepers)

    def _signal(self, number: int) -> None:
        for worker in self._workers.values():
            worker.process.send_signal(number)

    async def _worker_serves(self, number: int) -> None:
        """Wait until this worker, or its replacement, serves."""
        while not (worker := self._workers[number]).serves.is_set():
            with suppress(TimeoutError):
                async with asyncio.timeout(FIRST_PAUSE_S):
                    await worker.serves.wait()

    async def _keep(self, number: int) -> None:
        """Start a worker, and restart it whenever it ends, until the pool ends."""
        pause_s = FIRST_PAUSE_S
        while not self._is_ending.is_set():
            worker = self._workers[number] = _Worker(self._sockets[number])
            code = await worker.run(self._new_start(number=number, fds=worker.fds), self._engine)
            if self._is_ending.is_set():
                return
            if time.monotonic() - worker.began_s > MAX_PAUSE_S:
                pause_s = FIRST_PAUSE_S
            logger.error(
                "HTTP worker %d (pid %d) exited with code %d; restarting in %g s",
                number,
                worker.process.pid,
                code,
                pause_s,
            )
            with suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._is_ending.wait()
            pause_s = min(2 * pause_s, MAX_PAUSE_S)
