"""Calls: the CONTROLs and PINGs of a session that await their answers."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeAlias, TypedDict, TypeVar, Unpack

from nanocore.protocol.errors import NanocoreError
from nanocore.protocol.messages import Control, ControlOperation, Message, Ping, Pong, Reply

Answer = TypeVar("Answer", bound=Message)
Send: TypeAlias = Callable[[Message], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class EngineHealth:
    """An engine's answer to a PING.

    latency_s: there and back. num_steps: its step counter. step_age_s: for how long the step that
    it is in has been running, 0 if it is in none; None of engines that speak a protocol before 1.4.
    """

    latency_s: float
    num_steps: int
    step_age_s: float | None = None


class ControlFields(TypedDict, total=False):
    """Of a CONTROL: file and offset of read_file, after of steps."""

    file: str | None
    offset: int
    after: int


class Calls:
    """Belongs to a connection. send: says something to its engine."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._replies: dict[int, asyncio.Future[Reply]] = {}
        self._pongs: dict[int, asyncio.Future[Pong]] = {}
        self._ids = itertools.count(1)

    def __len__(self) -> int:
        """Calls that await an answer."""
        return len(self._replies) + len(self._pongs)

    async def control(self, operation: ControlOperation, **fields: Unpack[ControlFields]) -> Reply:
        """The answer to a CONTROL."""
        return await self._call(
            self._replies,
            lambda call_id: Control(call_id=call_id, operation=operation, **fields),
        )

    async def ping(self) -> Pong:
        """The answer to a PING."""
        return await self._call(self._pongs, lambda nonce: Ping(nonce=nonce))

    def answer(self, message: Reply | Pong) -> None:
        """An answer has come, which somebody may wait for."""
        if isinstance(message, Reply):
            _resolve(self._replies.get(message.call_id), message)
        else:
            _resolve(self._pongs.get(message.nonce), message)

    def fail(self, error: NanocoreError) -> None:
        """There will be no more answers."""
        waiting: list[asyncio.Future[Any]] = [*self._replies.values(), *self._pongs.values()]
        for future in waiting:
            if not future.done():
                future.set_exception(error)
                future.exception()  # looked at: a call that could not be sent awaits it no more

    async def _call(
        self, waiting: dict[int, asyncio.Future[Answer]], make_message: Callable[[int], Message]
    ) -> Answer:
        call_id = next(self._ids)
        waiting[call_id] = asyncio.get_running_loop().create_future()
        try:
            await self._send(make_message(call_id))
            return await waiting[call_id]
        finally:
            del waiting[call_id]


def _resolve(future: asyncio.Future[Answer] | None, message: Answer) -> None:
    if future is not None and not future.done():
        future.set_result(message)
