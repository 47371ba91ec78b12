"""A ClientSocket without a socket, to see what happens between two turns of the event loop."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence

from nanocore.protocol.codec import encode, engine_decoder
from nanocore.protocol.messages import Message
from tests.client.fake_engine import welcome_message


class FakeSocket:
    """The engine says WELCOME, and after it what it was told to `say` before.

    messages: what has been sent, in order. stuck: whether nothing can be sent any more, as while no
    engine is connected.
    """

    is_accepted = is_connected = True
    is_tcp = False

    def __init__(self, endpoint: str = "") -> None:
        self.messages: list[Message] = []
        self.stuck = False
        self._answers = deque([encode(welcome_message())])
        self._decoder = engine_decoder()

    def say(self, message: Message) -> None:
        self._answers.append(encode(message))

    async def send(self, frames: Sequence[bytes]) -> None:
        if not self.send_nowait(frames):
            await asyncio.get_running_loop().create_future()

    def send_nowait(self, frames: Sequence[bytes]) -> bool:
        self.post(frames)
        return not self.stuck

    def post(self, frames: Sequence[bytes]) -> None:
        """Take a message, which is lost if nothing can be sent."""
        if not self.stuck:
            self.messages.append(self._decoder.decode(frames))

    async def receive(self) -> list[bytes]:
        while (frames := self.receive_nowait()) is None:
            await asyncio.get_running_loop().create_future()
        return frames

    def receive_nowait(self) -> list[bytes] | None:
        return self._answers.popleft() if self._answers else None

    def close(self) -> None:
        """Do nothing."""
