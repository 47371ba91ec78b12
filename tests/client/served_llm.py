"""A fake engine, and an LLM that has joined it: see the fixture `joining`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from nanocore.client import LLM
from nanocore.protocol.messages import Message
from tests.client.fake_engine import FakeEngine


@asynccontextmanager
async def served(
    endpoint: str, welcome: Message | None = None
) -> AsyncIterator[tuple[FakeEngine, LLM]]:
    engine = FakeEngine(endpoint)
    try:
        welcoming = asyncio.create_task(engine.welcome(welcome))
        llm = await asyncio.to_thread(LLM)
        await welcoming
        try:
            yield engine, llm
        finally:
            await asyncio.to_thread(llm.close)
    finally:
        engine.close()
