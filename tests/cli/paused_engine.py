"""An engine that does no step for a while: what is asked of it waits, as long as a test wants."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from nanocore.client import AsyncEngineClient


@contextmanager
def paused(endpoint: str) -> Iterator[PausedEngine]:
    """An engine that does no step while the block runs: what is asked of it waits."""
    with asyncio.Runner() as runner:
        client = AsyncEngineClient.connect(endpoint, timeout_s=60)
        runner.run(client.__aenter__())
        runner.run(client.pause())
        try:
            yield PausedEngine(runner, client)
        finally:
            runner.run(client.close())


class PausedEngine:
    def __init__(self, runner: asyncio.Runner, client: AsyncEngineClient) -> None:
        self._runner = runner
        self._client = client

    def wait_for(self, num_requests: int) -> None:
        """Until so many requests wait."""

        async def wait() -> None:
            while True:
                stats = await self._client.stats()
                if stats.num_requests_waiting + stats.num_requests_running == num_requests:
                    return

        self._runner.run(wait())

    def resume(self) -> None:
        self._runner.run(self._client.resume())
