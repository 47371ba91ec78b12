"""A real engine with the demo model behind the HTTP server, for tests with real client libraries.

The engine is a process of its own; the server runs in a thread of the test's, at a port of loopback
that is free, and is what `nanocore serve --endpoint` runs.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager

import uvloop

from nanocore.demo_model import demo_model_folder
from nanocore.http.server.service import HttpService
from nanocore.http.server_settings import AppSettings, EngineAddress, ServerSettings
from tests.end_to_end.forked import engine

DEMO = demo_model_folder()
MODEL_NAME = "demo"
START_TIMEOUT_S = 60.0


@contextmanager
def served_engine(*flags: str) -> Iterator[str]:
    """The server's URL, without a path. flags: the engine's."""
    with (
        engine(DEMO, *flags) as running,
        socket.create_server(("127.0.0.1", 0)) as listening,
        ThreadPoolExecutor(1) as thread,
    ):
        is_over = asyncio.Event()
        ready: Future[asyncio.AbstractEventLoop] = Future()
        serving = thread.submit(uvloop.run, _serve(running.endpoint, listening, ready, is_over))
        if serving in wait([ready, serving], return_when=FIRST_COMPLETED).done:
            serving.result()
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        finally:
            ready.result().call_soon_threadsafe(is_over.set)
            serving.result()


async def _serve(
    endpoint: str,
    listening: socket.socket,
    ready: Future[asyncio.AbstractEventLoop],
    is_over: asyncio.Event,
) -> None:
    service = HttpService(AppSettings(served_model_names=(MODEL_NAME,)), ServerSettings())
    try:
        await service.start([listening])
        await service.connect(EngineAddress(endpoint=(endpoint,)), START_TIMEOUT_S)
        ready.set_result(asyncio.get_running_loop())
        await is_over.wait()
    finally:
        await service.close()
