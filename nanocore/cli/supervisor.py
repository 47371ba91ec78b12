"""Supervisor: a server's processes and its engine, from their start to their end.

One process serves HTTP itself; for several it keeps workers. An engine that was launched here ends
with the server, is replaced when it dies, and takes the server with it when it has ended for good;
one that was joined is none of ours. A first signal lets responses that run come to their end, a
second one leaves at once: the kernel ends what is left.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
from collections.abc import Coroutine
from typing import Any, Final, TypeVar

import uvloop

from nanocore import __version__
from nanocore.cli.serve_options import ServeOptions
from nanocore.cli.worker_pool import WorkerPool
from nanocore.client.connection.engine_supervisor import EngineSupervisor
from nanocore.http.service import EngineAddress, HttpService, freeze_startup
from nanocore.protocol.errors import EngineDeadError, NanocoreError

logger = logging.getLogger(__name__)

Result = TypeVar("Result")
CONNECT_TIMEOUT_S: Final = 60.0
"""To an engine that has said that it serves."""
FAREWELL_TIMEOUT_S: Final = 2.0
"""For clients to be told that the engine is gone."""
INTERRUPTED: Final = 130


class _SignalError(Exception):
    """A first signal came."""


class Supervisor:
    """Of one server. sockets: that listen, those of each process."""

    def __init__(self, options: ServeOptions, sockets: list[list[socket.socket]]) -> None:
        self._options = options
        self._sockets = sockets
        self._front: HttpService | WorkerPool
        if options.http_workers == 1:
            self._front = HttpService(options.app, options.server)
        else:
            HttpService(options.app, options.server)  # what is wrong with TLS is said here and once
            self._front = WorkerPool(
                options.app, options.server, options.shutdown_timeout_s, options.log_format
            )
        self._engine: EngineSupervisor | None = None
        self._engine_end: asyncio.Future[NanocoreError]
        self._signal: asyncio.Future[int]

    def run(self) -> int:
        """Serve until a signal or the engine's end; the exit code.

        Raises:
            NanocoreError: the engine did not start, or has ended.
        """
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(self._run())

    async def _run(self) -> int:
        self._handle_signals()
        url = self._url()
        try:
            await self._start_front()
            logger.info("nanocore %s | listening at %s", __version__, url)
            engine = await self._start_engine()
            card = await self._unless_over(self._front.connect(engine, self._connect_timeout_s))
            freeze_startup()
            logger.info("ready: %s at %s | engine %s", card.model, url, ", ".join(engine.endpoints))
            await self._unless_over(asyncio.Event().wait())
            raise AssertionError
        except _SignalError:
            number = self._signal.result()
            await self._drain(signal.Signals(number).name)
            return INTERRUPTED if number == signal.SIGINT else 0
        except EngineDeadError:
            await self._front.drain(FAREWELL_TIMEOUT_S)
            raise
        finally:
            await self._front.close()
            if self._engine is not None:
                await self._engine.stop()

    @property
    def _connect_timeout_s(self) -> float:
        return (
            CONNECT_TIMEOUT_S if self._engine is not None else self._options.engine.start_timeout_s
        )

    async def _start_front(self) -> None:
        if isinstance(self._front, WorkerPool):
            await self._front.start(self._sockets)
        else:
            await self._front.start(self._sockets[0])

    async def _start_engine(self) -> EngineAddress:
        choice = self._options.engine
        endpoints = choice.endpoints
        if not endpoints:
            logger.info("launching an engine: %s", " ".join(choice.flags) or "no flags")
            supervisor = EngineSupervisor(choice.flags, choice.max_restarts, self._options.standby)
            supervisor.on_ready(self._on_ready)
            supervisor.on_ended(self._engine_end.set_result)
            self._engine = supervisor
            await self._unless_over(supervisor.start(choice.start_timeout_s))
            endpoints = (supervisor.endpoint,)
        return EngineAddress(
            endpoints=endpoints, curve_dir=choice.curve_dir, tokenizer=choice.tokenizer
        )

    def _on_ready(self) -> None:
        supervisor = self._engine
        assert supervisor is not None, "it has started"
        gap_s = supervisor.last_ready_s - supervisor.last_death_s
        logger.info("ready: an engine serves again, %.2f s after the end of the last one", gap_s)

    async def _unless_over(self, coroutine: Coroutine[Any, Any, Result]) -> Result:
        """Its result; but a signal, or the end of our engine for good, comes before it."""
        task = asyncio.create_task(coroutine)
        ends: set[asyncio.Future[Any]] = {self._signal, self._engine_end}
        try:
            await asyncio.wait({task, *ends}, return_when=asyncio.FIRST_COMPLETED)
            if self._signal.done():
                raise _SignalError
            if self._engine_end.done():
                why = self._engine_end.result()
                raise EngineDeadError(f"{why}, and the server ends with it; its log says more")
            return await task
        finally:
            if not task.done():
                task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _drain(self, cause: str) -> None:
        timeout_s = self._options.shutdown_timeout_s
        if isinstance(self._front, HttpService) and not self._front.num_running:
            logger.info("stopping: %s", cause)
        else:
            logger.info(
                "%s: responses that run may come to their end, for at most %g s; another signal "
                "ends them at once",
                cause,
                timeout_s,
            )
        if not await self._front.drain(timeout_s):
            logger.info("some responses were not complete after %g s, and are cut", timeout_s)

    def _handle_signals(self) -> None:
        loop = asyncio.get_running_loop()
        self._signal = loop.create_future()
        self._engine_end = loop.create_future()

        def on_signal(number: int) -> None:
            if self._signal.done():
                os._exit(INTERRUPTED)
            self._signal.set_result(number)

        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, on_signal, number)
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as nohup has it
            loop.add_signal_handler(signal.SIGHUP, on_signal, signal.SIGHUP)

    def _url(self) -> str:
        """The server's, for people."""
        options = self._options
        if options.uds is not None:
            return f"unix:{options.uds}"
        port = self._sockets[0][0].getsockname()[1]
        host = f"[{options.host}]" if ":" in options.host else options.host
        return f"{options.server.scheme}://{host}:{port}"
