"""CONTROL and PING messages of a session that wait for their replies."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias, TypeVar

import msgspec

from nanocore.protocol.errors import EngineDeadError, NanocoreError
from nanocore.protocol.messages import Control, ControlOperation, Message, Ping, Pong, Reply

ReplyMessage = TypeVar("ReplyMessage", Reply, Pong)
Send: TypeAlias = Callable[[Message], Awaitable[None]]


class EngineHealth(msgspec.Struct, frozen=True):
    """Reply of an engine to a PING.

    latency_s: round trip. num_steps: the engine's step counter. step_age_s: time since the current
    step began, 0 between steps; None from engines whose protocol is older than 1.4.
    """

    latency_s: float
    num_steps: int
    step_age_s: float | None = None


class ControlCalls:
    """Calls of one connection that wait for a reply. send: sends a message."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._waiting: dict[tuple[type[Reply | Pong], int], asyncio.Future[Any]] = {}
        self._ids = itertools.count(1)

    def __len__(self) -> int:
        return len(self._waiting)

    async def control(
        self, operation: ControlOperation, file: str | None = None, offset: int = 0, after: int = 0
    ) -> Reply:
        """Return the reply to a CONTROL. file, offset: of read_file. after: of steps."""
        call_id = next(self._ids)
        return await self._call((Reply, call_id), Control(call_id, operation, file, offset, after))

    async def ping(self, timeout_s: float) -> EngineHealth:
        """Measure the round trip of a PING; raises EngineDeadError."""
        start_s = time.monotonic()
        try:
            async with asyncio.timeout(timeout_s):
                nonce = next(self._ids)
                pong = await self._call((Pong, nonce), Ping(nonce=nonce))
        except TimeoutError:
            raise EngineDeadError(f"the engine did not answer within {timeout_s} s") from None
        age_ms = pong.step_age_ms
        return EngineHealth(
            latency_s=time.monotonic() - start_s,
            num_steps=pong.num_steps or 0,
            step_age_s=None if age_ms is None else age_ms / 1e3,
        )

    def resolve(self, message: Reply | Pong) -> None:
        """Pass a reply to its call, if it still waits."""
        call_id = message.call_id if isinstance(message, Reply) else message.nonce
        future = self._waiting.get((type(message), call_id))
        if future is not None and not future.done():
            future.set_result(message)

    def fail(self, error: NanocoreError) -> None:
        """Raise the error in all waiting calls."""
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(error)
                future.exception()  # retrieve it: a call that could not be sent never awaits it

    async def _call(
        self, awaited: tuple[type[ReplyMessage], int], message: Message
    ) -> ReplyMessage:
        """Send a message and return its reply. awaited: the reply's type and number."""
        future: asyncio.Future[ReplyMessage] = asyncio.get_running_loop().create_future()
        self._waiting[awaited] = future
        try:
            await self._send(message)
            return await future
        finally:
            del self._waiting[awaited]
