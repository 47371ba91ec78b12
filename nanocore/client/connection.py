"""A client's session with one engine: the receive loop, and who waits for what.

Lives in one asyncio event loop. Every wait ends: with the connection, or because an engine that
says nothing for `ENGINE_TIMEOUT_S`, although it pings every second, is taken for dead. Whoever
waits is then told. A session that has ended stays so; `EngineLink` opens the next one.
Messages that have piled up are taken in together, so readers find their tokens merged.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any, Final, NoReturn, TypeAlias, Unpack

from nanocore.client.calls import Calls, ControlFields, EngineHealth
from nanocore.client.handshake import say_hello
from nanocore.client.part import Part
from nanocore.client.sample import Sample
from nanocore.client.stream import RequestStream
from nanocore.client.stream_table import StreamTable
from nanocore.protocol.codec import client_decoder, encode, pack_uint32
from nanocore.protocol.errors import (
    ClientStateError,
    EngineDeadError,
    InvalidRequestError,
    NanocoreError,
    ProtocolError,
    exception_for,
)
from nanocore.protocol.messages import (
    Abort,
    Accepted,
    Bye,
    ControlOperation,
    Draining,
    Error,
    Message,
    Output,
    Ping,
    Pong,
    Reply,
    Submit,
    Welcome,
)
from nanocore.protocol.sockets import ClientKeys, ClientSocket, ConnectionLostError

ENGINE_TIMEOUT_S: Final = 10.0
TCP_ENGINE_TIMEOUT_S: Final = 1.8  # where only silence tells that its machine is gone
GRACE_S: Final = 1.0
"""If the event loop was blocked for long, what arrived meanwhile is read only now."""
_MAX_BATCH: Final = 64
_MAX_BATCH_BYTES: Final = 2**18
"""Messages taken in at once, before their readers get a turn."""
NO_SESSION: Final = "no_session"
Explain: TypeAlias = Callable[[NanocoreError], Awaitable[NanocoreError]]
Rescue: TypeAlias = "Callable[[Part, NanocoreError, EngineConnection], bool]"


class EngineStoppedError(EngineDeadError):
    """The engine has said BYE."""


class EngineConnection:
    """An open session. Made by `open`; ends by `close`, by BYE, by silence, or with its connection.

    explain: finds out what has become of an engine that has lost our session; what it returns is
    told to those who wait, and if nobody does it is not called. rescue: offered what was open.

    is_draining: the engine takes nothing new, and ends when it has finished what it has.
    """

    def __init__(
        self,
        socket: ClientSocket,
        welcome: Welcome,
        explain: Explain | None = None,
        rescue: Rescue | None = None,
    ) -> None:
        self.welcome = welcome
        self.is_draining = False
        self._socket = socket
        self._explain = explain
        self._decoder = client_decoder()
        self._streams = StreamTable(rescue and (lambda part, error: rescue(part, error, self)))
        self._calls = Calls(self._say)
        self._loss: NanocoreError | None = None  # while it is being explained
        self._error: NanocoreError | None = None
        self._loop = asyncio.get_running_loop()
        self._heard_s = self._loop.time()
        self._suspected_s: float | None = None  # the last sign of life when silence was noticed
        self._timeout_s = TCP_ENGINE_TIMEOUT_S if socket.is_tcp else ENGINE_TIMEOUT_S
        self._timer = self._loop.call_later(self._timeout_s, self.check_silence)
        self._task = asyncio.create_task(self._receive_loop(), name="nanocore-receive")

    @classmethod
    async def open(
        cls,
        endpoint: str,
        timeout_s: float,
        keys: ClientKeys | None = None,
        *,
        patient: bool = True,
        explain: Explain | None = None,
        rescue: Rescue | None = None,
    ) -> EngineConnection:
        """Open a session; raises as `say_hello`."""
        socket, welcome = await say_hello(endpoint, timeout_s, keys, patient=patient)
        return cls(socket, welcome, explain, rescue)

    @property
    def end(self) -> NanocoreError | None:
        """Why the session is over, as well as it is known; None while it is open."""
        return self._error or self._loss

    @property
    def cause(self) -> NanocoreError | None:
        """The same, as it was first noticed."""
        return self._loss or self._error

    async def submit(self, stream: RequestStream, submit: Submit, part: Part | None = None) -> None:
        """Send a request, or a part of one; its output, or why there is none, goes to the stream.

        Raises:
            InvalidRequestError: a request of this id is running. EngineDeadError: as it says.
        """
        if self.end is not None and part is None:
            lost = Part(submit.request_id, stream, [*stream.samples])
            if self._streams.offer(lost, self.end):
                return
        self._check_alive()
        if submit.request_id in self._streams:
            text = f"request_id {submit.request_id!r} is in use: choose another"
            raise exception_for("duplicate_request_id", text)
        try:
            frames = encode(submit)
        except (TypeError, ValueError, OverflowError) as error:
            raise InvalidRequestError(f"the request cannot be encoded: {error}") from None
        num_bytes, limit = len(frames[-1]), self.welcome.limits.max_frame_bytes
        if num_bytes > limit:  # the engine would cut the connection, and all requests with it
            raise InvalidRequestError(
                f"the request has {num_bytes} bytes, 4 for each token of its prompt: the engine "
                f"takes at most {limit}"
            )
        part = part or Part(submit.request_id, stream, [*stream.samples])
        self._streams.add(stream, part)
        try:
            await self._send(frames)
        except BaseException as error:  # cancelled, perhaps after it was sent
            if isinstance(error, NanocoreError) and not self._streams.holds(part):
                return  # it has been handed over
            self._streams.remove(part)
            self.abort(submit.request_id)
            raise

    def uses(self, request_id: str) -> bool:
        """Whether this id is in use."""
        return request_id in self._streams

    def abort(self, request_id: str) -> None:
        """End a request, without waiting. Ids that have ended are ignored."""
        if self.end is None:
            self._socket.post(encode(Abort(request_ids=self._streams.wire_ids(request_id))))

    def leave(self, stream: RequestStream, sample: Sample | None) -> None:
        """Forget a stream, or a sample of it, that is not read to its end, and abort it.

        What of it is not in this session is left alone.
        """
        samples = [one for one in stream.samples if self._streams.has(one)]
        if sample is None and samples:
            self.abort(stream.request_id)
        elif sample is not None and sample in samples and self.end is None:
            # Without a handle it has been sent again, alone, and is not answered yet.
            name: dict[str, Any] = {"request_ids": [sample.request_id]}
            if sample.handle is not None:
                name = {"request_ids": [], "handles": pack_uint32([sample.handle])}
            self._socket.post(encode(Abort(**name)))
        self._streams.leave(stream, sample)

    async def control(self, operation: ControlOperation, **fields: Unpack[ControlFields]) -> Reply:
        """Run a CONTROL operation and wait for its reply."""
        return await self._calls.control(operation, **fields)

    async def ping(self, timeout_s: float) -> EngineHealth:
        """Ask for a sign of life.

        Raises:
            EngineDeadError: none came within timeout_s.
        """
        start_s = time.monotonic()
        try:
            async with asyncio.timeout(timeout_s):
                pong = await self._calls.ping()
        except TimeoutError:
            raise EngineDeadError(f"the engine did not answer within {timeout_s} s") from None
        age_ms = pong.step_age_ms
        return EngineHealth(
            latency_s=time.monotonic() - start_s,
            num_steps=pong.num_steps or 0,
            step_age_s=None if age_ms is None else age_ms / 1e3,
        )

    def ask_for_session_timeout(self, milliseconds: int) -> None:
        """Have the engine end our requests after so long a silence, if it knows how to."""
        if self.welcome.protocol >= (1, 9):
            self._socket.post(encode(Ping(session_timeout_ms=milliseconds)))

    def fail(self, error: NanocoreError) -> None:
        """End the session because of an error: everyone who waits gets it. The first one counts."""
        if self._error is not None:
            return
        self._error = error
        self._task.cancel()
        self.release()
        self._streams.fail(error)
        self._calls.fail(error)

    async def close(self) -> None:
        """Say BYE and close. Idempotent."""
        if self.end is None:
            self._socket.post(encode(Bye(reason="the client is done")))
        self.fail(ClientStateError("this client was closed"))
        await asyncio.gather(self._task, return_exceptions=True)

    def release(self) -> None:
        """Free the socket without a word, from wherever. Idempotent."""
        self._timer.cancel()
        self._socket.close()

    def _check_alive(self) -> None:
        if self.end is not None:
            raise self.end

    async def _say(self, message: Message) -> None:
        self._check_alive()
        await self._send(encode(message))

    async def _send(self, frames: list[bytes]) -> None:
        """Send, waiting for room, but not for an engine that is gone."""
        if self._socket.send_nowait(frames):
            return
        sending = asyncio.ensure_future(self._socket.send(frames))
        try:
            await asyncio.wait({sending, self._task}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            sending.cancel()  # no effect if it is sent
        self._check_alive()
        if sending.done():
            sending.result()

    async def _receive_loop(self) -> None:
        """Receive until the session ends. Whatever ends it, nobody may wait for ever."""
        try:
            try:
                await self._receive()
            except NanocoreError as error:
                self.fail(await self._explained(error))
        except Exception as error:
            self.fail(ProtocolError(f"receiving failed: {type(error).__name__}: {error}"))

    async def _receive(self) -> NoReturn:
        while True:
            frames = await self._socket.receive()
            self.take(frames)
            num_bytes = len(frames[-1])
            for _ in range(_MAX_BATCH):
                if num_bytes > _MAX_BATCH_BYTES:
                    await asyncio.sleep(0)  # receiving did not wait, so nobody else had a turn
                    break
                if (more := self._socket.receive_nowait()) is None:
                    break
                self.take(more)
                num_bytes += len(more[-1])
            else:
                await asyncio.sleep(0)

    async def _explained(self, error: NanocoreError) -> NanocoreError:
        """What those who wait are told of this end of the session."""
        is_loss = isinstance(error, ConnectionLostError) or getattr(error, "code", "") == NO_SESSION
        if not is_loss or self._explain is None:
            return error
        self._loss = error
        self.release()
        self._streams.hand_over(error)
        if not self._is_awaited:
            return error
        return await self._explain(error)

    @property
    def _is_awaited(self) -> bool:
        return bool(self._streams or self._calls)

    def take(self, frames: list[bytes]) -> None:
        """A message of the engine, which is a sign of life, too.

        Raises:
            ProtocolError: it is none.
        """
        self._heard_s = self._loop.time()
        self._handle(self._decoder.decode(frames))

    def check_silence(self) -> None:
        """The timer's call: take an engine that has not been heard of for dead."""
        deadline_s = self._heard_s + self._timeout_s
        if self._loop.time() < deadline_s:
            self._timer = self._loop.call_at(deadline_s, self.check_silence)
        elif self._suspected_s != self._heard_s:
            self._suspected_s = self._heard_s
            self._timer = self._loop.call_later(GRACE_S, self.check_silence)
        else:
            text = f"the engine has not been heard of for {self._timeout_s:g} s"
            self.fail(EngineDeadError(text))

    def _handle(self, message: Message) -> None:
        match message:
            case Output():
                self._streams.deliver(message)
            case Accepted():
                self._streams.accept(message)
            case Error():
                self._handle_error(message)
            case Ping(nonce=nonce):
                self._socket.post(encode(Pong(nonce=nonce)))
            case Pong() | Reply():
                self._calls.answer(message)
            case Draining():
                self.is_draining = True
            case Bye(reason=reason):
                raise EngineStoppedError(f"the engine has stopped: {reason}")

    def _handle_error(self, error: Error) -> None:
        exception = exception_for(error.code, error.message, error.retry_after_s)
        if error.code == NO_SESSION:  # its message is about ours that it was to answer
            text = f"the engine does not know this session any more ({error.message})"
            raise ProtocolError(text, NO_SESSION)
        if error.code == "engine_dead":
            raise exception
        if error.request_id is not None:
            self._streams.refuse(error.request_id, exception)
            return
        raise exception
