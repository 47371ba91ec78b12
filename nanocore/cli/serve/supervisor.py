"""Supervisor: starts and stops a server's HTTP processes and its engine.

With one HTTP process the supervisor serves HTTP itself; several are workers. A launched engine ends
with the server, is replaced when it dies, and ends the server when it has used up its restarts. A
joined engine is left alone. The first signal lets running responses finish. The second one exits at
once, and the kernel kills the children.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import time
from collections.abc import Awaitable
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final, TypeVar

import uvloop

from nanocore import __version__
from nanocore.cli.serve.flags import ServeOptions
from nanocore.client.connection.engine_supervisor import EngineSupervisor
from nanocore.http.server.tls import tls_context
from nanocore.http.server_settings import RESUME_TIMEOUT_S, EngineAddress
from nanocore.protocol.errors import EngineDeadError, NanocoreError
from nanocore.system.running import Running, registered

if TYPE_CHECKING:
    from nanocore.cli.serve.worker_pool import WorkerPool
    from nanocore.http.server.service import HttpService

logger = logging.getLogger(__name__)

Result = TypeVar("Result")
CONNECT_TIMEOUT_S: Final = 60.0
"""Time to connect to a launched engine that is ready."""
FAREWELL_TIMEOUT_S: Final = 2.0
"""Time for clients to receive the error after the engine's end."""
INTERRUPTED: Final = 130


class _SignalError(Exception):
    """The first signal arrived."""


class Supervisor:
    """sockets: listening, a list for each process.

    Raises:
        ConfigError: the TLS files are invalid.
    """

    def __init__(self, options: ServeOptions, sockets: list[list[socket.socket]]) -> None:
        self._options = options
        self._sockets = sockets
        tls_context(options.server)  # reports errors once, before an engine is launched
        self._front: HttpService | WorkerPool | None = None
        self._engine: EngineSupervisor | None = None
        self._engine_end: asyncio.Future[NanocoreError]
        self._signal: asyncio.Future[int]

    def run(self) -> int:
        """Serve until a signal; return the exit code.

        Raises:
            NanocoreError: the engine did not start, or has ended for good.
        """
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(self._run())

    async def _run(self) -> int:
        self._handle_signals()
        url = self._url()
        starting = asyncio.create_task(self._start_engine())
        try:
            await asyncio.sleep(0)  # the engine is launched, and loads while HTTP is imported
            front = await self._start_front()
            logger.info("nanocore %s | listening at %s", __version__, url)
            engine = await self._unless_over(starting)
            is_launched = self._engine is not None
            timeout_s = CONNECT_TIMEOUT_S if is_launched else self._options.engine.start_timeout_s
            card = await self._unless_over(front.connect(engine, timeout_s))
            name = next(iter(self._options.app.served_model_names), card.model)
            with registered(self._running(engine, name, url)):
                endpoints = ", ".join(engine.endpoint)
                logger.info("ready: %s at %s | engine %s", name, url, endpoints)
                await self._unless_over(asyncio.Event().wait())
            raise AssertionError
        except _SignalError:
            number = self._signal.result()
            await self._drain(signal.Signals(number).name)
            return INTERRUPTED if number == signal.SIGINT else 0
        except EngineDeadError:
            if self._front is not None:
                await self._front.drain(FAREWELL_TIMEOUT_S)
            raise
        finally:
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)
            if self._front is not None:
                await self._front.close()
            if self._engine is not None:
                await self._engine.stop()

    async def _start_front(self) -> HttpService | WorkerPool:
        options = self._options
        # In a thread, so that signals are handled meanwhile.
        fronts = asyncio.to_thread(import_module, "nanocore.cli.serve.worker_pool")  # takes long
        await self._unless_over(fronts)
        from nanocore.cli.serve.worker_pool import WorkerPool
        from nanocore.http.server.service import HttpService

        if options.http_workers == 1:
            self._front = service = HttpService(options.app, options.server)
            if self._engine is not None:
                self._engine.on_files(service.preload_tokenizer)
            await service.start(self._sockets[0])
            return service
        self._front = pool = WorkerPool(options)
        await pool.start(self._sockets)
        return pool

    async def _start_engine(self) -> EngineAddress:
        choice = self._options.engine
        endpoints, resume_timeout_s = choice.endpoints, RESUME_TIMEOUT_S
        if not endpoints:
            logger.info("launching an engine: %s", " ".join(choice.flags) or "no flags")
            keeper = EngineSupervisor(choice.flags, choice.max_restarts, self._options.standby)
            keeper.on_ready(self._on_ready)
            keeper.on_ended(self._engine_end.set_result)
            self._engine = keeper
            start_s = time.monotonic()
            await keeper.start(choice.start_timeout_s)
            endpoints = (keeper.endpoint,)
            # A restart takes as long, or longer beside other work: until then requests wait.
            resume_timeout_s += 2 * (time.monotonic() - start_s)
        return EngineAddress(
            endpoint=endpoints,
            curve_dir=choice.curve_dir,
            tokenizer=choice.tokenizer,
            resume_timeout_s=resume_timeout_s,
        )

    def _on_ready(self) -> None:
        keeper = self._engine
        assert keeper is not None, "it has started"
        gap_s = keeper.last_ready_s - keeper.last_death_s
        logger.info("ready: serving again %.2f s after the engine's end", gap_s)

    async def _unless_over(self, awaitable: Awaitable[Result]) -> Result:
        """Return the result, unless a signal or the engine's final end comes first."""
        task = asyncio.ensure_future(awaitable)
        ends: set[asyncio.Future[Any]] = {self._signal, self._engine_end}
        try:
            await asyncio.wait({task, *ends}, return_when=asyncio.FIRST_COMPLETED)
            if self._signal.done():
                raise _SignalError
            if self._engine_end.done():
                why = self._engine_end.result()
                raise EngineDeadError(f"{why}, so the server ends; see the engine's log")
            return await task
        finally:
            if not task.done():
                task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _drain(self, cause: str) -> None:
        timeout_s = self._options.shutdown_timeout_s
        if self._front is None or self._front.is_idle:
            logger.info("stopping: %s", cause)
        else:
            logger.info(
                "%s: waiting up to %g s for running responses; another signal exits at once",
                cause,
                timeout_s,
            )
        if self._front is not None and not await self._front.drain(timeout_s):
            logger.info("some responses were incomplete after %g s and were cut", timeout_s)

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
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # set by nohup
            loop.add_signal_handler(signal.SIGHUP, on_signal, signal.SIGHUP)

    def _url(self) -> str:
        options = self._options
        if options.uds is not None:
            return f"unix:{options.uds}"
        port = self._sockets[0][0].getsockname()[1]
        host = f"[{options.host}]" if ":" in options.host else options.host
        return f"{options.server.scheme}://{host}:{port}"

    def _running(self, engine: EngineAddress, model: str, url: str) -> Running:
        curve_dir, tokenizer = (
            None if path is None else os.path.abspath(path)
            for path in (engine.curve_dir, engine.tokenizer)
        )
        return Running(
            kind="server",
            pid=os.getpid(),
            address=url,
            model=model,
            endpoints=engine.endpoint,
            curve_dir=curve_dir,
            tokenizer=tokenizer,
            chat_template=self._options.app.chat_template,
            served_model_names=self._options.app.served_model_names,
        )
