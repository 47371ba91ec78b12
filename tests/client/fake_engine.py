"""An engine made of nothing but its socket: the test says what it answers, line by line.

It shares the test's event loop; only waiting for the socket happens in a thread. Whatever it waits
for must come within PATIENCE_S, and must be the message that the script expects.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import AsyncIterator, Awaitable, Mapping
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from msgspec.structs import replace

from nanocore.client import LLM
from nanocore.client.async_client import AsyncEngineClient
from nanocore.protocol.codec import encode, engine_decoder, pack_int32
from nanocore.protocol.messages import (
    MAX_FILE_CHUNK_BYTES,
    PROTOCOL_VERSION,
    Accepted,
    Control,
    Event,
    FinishReason,
    Hello,
    Message,
    ModelFile,
    Output,
    Ping,
    Reply,
    Submit,
    Welcome,
)
from nanocore.protocol.sampling import SamplingParams
from nanocore.protocol.sockets.curve import EngineKeys
from nanocore.protocol.sockets.engine_socket import bind_engine_socket
from nanocore.protocol.sockets.options import SendResult
from tests.client.running import PATIENCE_S
from tests.protocol.samples import LIMITS, MODEL_CARD, WELCOME

Expected = TypeVar("Expected", bound=Message)
Result = TypeVar("Result")
MAX_NUM_SEQS = 2
NO_TEXT = SamplingParams(detokenize=False)
"""For requests that need no tokenizer."""


def file_entry(name: Any, content: bytes) -> ModelFile:
    digest = hashlib.sha256(content).hexdigest()
    return ModelFile(name=name, num_bytes=len(content), sha256=digest)


def welcome_message(*files: ModelFile) -> Welcome:
    """WELCOME of an engine that serves these files of its model, whose folder is not here."""
    return replace(
        WELCOME,
        protocol=PROTOCOL_VERSION,
        model=replace(MODEL_CARD, model="/no/such/folder", files=list(files)),
        limits=replace(LIMITS, max_num_seqs=MAX_NUM_SEQS),
    )


class FakeEngine:
    """Serves one client at an endpoint."""

    def __init__(self, endpoint: str, keys: EngineKeys | None = None) -> None:
        self._socket = bind_engine_socket(endpoint, keys)
        self._decoder = engine_decoder()
        self._client = b""

    async def receive(self, expected: type[Expected]) -> Expected:
        """The client's next message, which must be of this type.

        How long its session may be silent is not looked at.
        """
        while True:
            message = self._decoder.decode(await asyncio.to_thread(self._next_frames))
            if not isinstance(message, Ping) or message.session_timeout_ms is None:
                break
        assert isinstance(message, expected), f"expected {expected.__name__}, got {message}"
        return message

    def send(self, message: Message) -> None:
        self.send_frames(encode(message))

    def send_frames(self, frames: list[bytes]) -> None:
        """Say something that may be no message."""
        assert self._socket.send(self._client, frames) is SendResult.SENT

    async def flush(self) -> None:
        """Wait until the client's socket has taken all that was said: more than it holds at once.

        On ipc nobody else sends it; libzmq, on TCP, has a thread for that.
        """
        while getattr(self._socket, "num_output_bytes", 0):
            await asyncio.to_thread(self._socket.wait, 10)

    async def welcome(self, message: Message | None = None) -> Hello:
        hello = await self.receive(Hello)
        self.send(message or welcome_message())
        return hello

    async def accept(self, handle: int = 1) -> Submit:
        submit = await self.receive(Submit)
        self.send(Accepted(request_id=submit.request_id, handle=handle, seed=0))
        return submit

    async def begin(self, call: Awaitable[Result], handle: int = 1) -> asyncio.Future[Result]:
        """Accept the request that a call of the client makes."""
        task = asyncio.ensure_future(call)
        await self.accept(handle)
        return task

    async def serve_chunks(self, num: int, contents: Mapping[str, bytes]) -> None:
        """Answer so many CONTROL read_file."""
        for _ in range(num):
            control = await self.receive(Control)
            assert control.operation == "read_file"
            end = control.offset + MAX_FILE_CHUNK_BYTES
            data = contents[control.file or ""][control.offset : end]
            self.send(Reply(call_id=control.call_id, data=data))
        await self.flush()

    def output(self, tokens: dict[int, list[int]], *events: Event, **fields: Any) -> None:
        """OUTPUT with these tokens by handle; counts are sent only if they are needed."""
        counts = [len(ids) for ids in tokens.values()]
        self.send(
            Output(
                handles=pack_int32(tokens),
                tokens=pack_int32(token for ids in tokens.values() for token in ids),
                counts=None if counts == [1] * len(counts) else pack_int32(counts),
                events=list(events),
                **fields,
            )
        )

    def finish(self, handle: int = 1, reason: FinishReason = "length") -> None:
        self.output({}, Event(handle=handle, finish_reason=reason))

    def close(self) -> None:
        self._socket.close()

    def _next_frames(self) -> list[bytes]:
        deadline_s = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline_s:
            if (message := self._socket.receive()) is not None:
                self._client, frames = message
                return frames
            self._socket.wait(100)
        raise AssertionError("the client said nothing")


@asynccontextmanager
async def connected(
    endpoint: str, welcome: Message | None = None, **options: Any
) -> AsyncIterator[tuple[FakeEngine, AsyncEngineClient]]:
    """A fake engine and a client with an open session. options: of `AsyncEngineClient.connect`.

    Nothing comes after this engine, so its client does not wait for another, unless it is to.
    """
    engine = FakeEngine(endpoint)
    options = {"timeout_s": PATIENCE_S, "resume": False, **options}
    try:
        welcoming = asyncio.create_task(engine.welcome(welcome))
        async with AsyncEngineClient.connect(endpoint, **options) as client:
            await welcoming
            yield engine, client
    finally:
        engine.close()


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


async def until_lost(client: AsyncEngineClient) -> None:
    assert client._manager is not None
    while client.is_connected:
        await asyncio.sleep(0)
