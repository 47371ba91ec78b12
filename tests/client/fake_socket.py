"""A ClientSocket without a socket, to see what happens between two turns of the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from nanocore.protocol.codec import encode, engine_decoder
from nanocore.protocol.messages import Message
from tests.client.fake_engine import welcome_message


class FakeSocket:
    """The engine says WELCOME, and nothing after it.

    messages: what has been sent, in order. stuck: whether nothing can be sent any more, as while no
    engine is connected.
    """

    def __init__(self, endpoint: str = "") -> None:
        self.messages: list[Message] = []
        self.stuck = False
        self._answers = [encode(welcome_message())]
        self._decoder = engine_decoder()

    async def send(self, frames: Sequence[bytes]) -> None:
        """Take a message, or wait for ever."""
        if self.stuck:
            await asyncio.get_running_loop().create_future()
        self.post(frames)

    def post(self, frames: Sequence[bytes]) -> None:
        """Take a message, which is lost if nothing can be sent."""
        if not self.stuck:
            self.messages.append(self._decoder.decode(frames))

    async def receive(self) -> list[bytes]:
        """The engine's next message, or wait for ever."""
        if not self._answers:
            await asyncio.get_running_loop().create_future()
        return self._answers.pop()

    def close(self) -> None:
        """Do nothing."""
