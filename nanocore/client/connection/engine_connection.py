"""One session with one engine: sends and receives messages, and wakes waiting callers.

Belongs to one asyncio event loop. Every wait ends: with the connection, or when the engine, which
pings every second, has been silent for `ENGINE_TIMEOUT_S`. `SessionManager` opens the next session.
All queued messages are handled before readers run, so that these find their tokens merged.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Final, NoReturn, TypeAlias

from nanocore.client.connection.control_calls import ControlCalls
from nanocore.client.connection.handshake import say_hello
from nanocore.client.connection.request_table import OpenRequest, RequestTable
from nanocore.client.requests.request_stream import RequestStream
from nanocore.client.requests.sample import Sample
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
from nanocore.protocol.sockets.client_socket import ClientSocket, ConnectionLostError
from nanocore.protocol.sockets.curve import ClientKeys

ENGINE_TIMEOUT_S: Final = 10.0
TCP_ENGINE_TIMEOUT_S: Final = 1.8  # over TCP, silence is the only sign of a lost machine
GRACE_S: Final = 1.0
"""Extra time after silence: if our event loop was blocked, messages may be waiting."""
_MAX_BATCH: Final = 64
_MAX_BATCH_BYTES: Final = 2**18
"""Limits of messages and bytes that are handled before other tasks run."""
NO_SESSION: Final = "no_session"
Diagnose: TypeAlias = Callable[[NanocoreError], Awaitable[NanocoreError]]
TakeOver: TypeAlias = "Callable[[OpenRequest, NanocoreError, EngineConnection], bool]"


class EngineStoppedError(EngineDeadError):
    """The engine has said BYE."""


class EngineConnection:
    """An open session. Made by `open`; ends by `close`, BYE, silence, or a lost connection.

    Args:
        diagnose: returns the cause of a lost connection as an error, with which waiting requests
            and calls fail; not called if nothing waits.
        take_over: offered the requests that were open when the session ended; those that it takes
            do not fail.

    is_draining: the engine takes no new requests, and stops when it has finished the others.
    """

    def __init__(
        self,
        socket: ClientSocket,
        welcome: Welcome,
        diagnose: Diagnose | None = None,
        take_over: TakeOver | None = None,
    ) -> None:
        self.welcome = welcome
        self.is_draining = False
        self.first_error: NanocoreError | None = None
        self._final_error: NanocoreError | None = None  # once it is diagnosed
        self._socket = socket
        self._diagnose = diagnose
        self._decoder = client_decoder()
        self._requests = RequestTable(
            take_over and (lambda request, error: take_over(request, error, self))
        )
        self.calls = ControlCalls(self._send_message)
        self._loop = asyncio.get_running_loop()
        self._heard_s = self._loop.time()
        self._suspected_s: float | None = None  # _heard_s when silence was first noticed
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
        wait_for_listener: bool = True,
        diagnose: Diagnose | None = None,
        take_over: TakeOver | None = None,
    ) -> EngineConnection:
        """Open a session; raises as `say_hello`."""
        socket, welcome = await say_hello(
            endpoint, timeout_s, keys, wait_for_listener=wait_for_listener
        )
        return cls(socket, welcome, diagnose, take_over)

    @property
    def error(self) -> NanocoreError | None:
        """Why the session has ended; None while it is open."""
        return self._final_error or self.first_error

    async def submit(self, request: OpenRequest, message: Submit) -> None:
        """Send a request; its stream gets the output or error.

        Raises:
            InvalidRequestError: a request of this id is running, or the message is too large.
            EngineDeadError: the session has ended, and the request does not continue elsewhere.
        """
        if self.error is not None and not request.stream.resumes:
            if self._requests.take_over(request, self.error):
                return
        self._check_open()
        if request.request_id in self._requests:
            text = f"request_id {request.request_id!r} is in use: choose another"
            raise exception_for("duplicate_request_id", text)
        try:
            frames = encode(message)
        except (TypeError, ValueError, OverflowError) as error:
            raise InvalidRequestError(f"the request cannot be encoded: {error}") from None
        num_bytes, limit = len(frames[-1]), self.welcome.limits.max_frame_bytes
        # The engine would close the connection and end all requests of the session.
        if num_bytes > limit:
            raise InvalidRequestError(
                f"the request has {num_bytes} bytes, 4 for each token of its prompt: the engine "
                f"takes at most {limit}"
            )
        self._requests.add(request)  # before sending, because the reply may come at once
        try:
            await self._send(frames)
        except BaseException as error:
            if isinstance(error, NanocoreError) and not self._requests.holds(request):
                return  # the session ended and the request was taken over
            # If this was cancelled, the request may have been sent: abort it.
            self._requests.remove(request)
            self.abort(request.request_id)
            raise

    def uses(self, request_id: str) -> bool:
        return request_id in self._requests

    def abort(self, request_id: str) -> None:
        """Send ABORT, without waiting. The engine ignores ids that have ended."""
        if self.error is None:
            self._socket.post(encode(Abort(request_ids=self._requests.wire_ids(request_id))))

    def leave(self, stream: RequestStream, sample: Sample | None) -> None:
        """Abort and forget a stream, or one sample of it, if it runs in this session."""
        samples = [one for one in stream.samples if self._requests.has(one)]
        if sample is None and samples:
            self.abort(stream.request_id)
        elif sample is not None and sample in samples and self.error is None:
            # A sample without a handle was resubmitted alone and is not accepted yet.
            name: dict[str, Any] = {"request_ids": [sample.request_id]}
            if sample.handle is not None:
                name = {"request_ids": [], "handles": pack_uint32([sample.handle])}
            self._socket.post(encode(Abort(**name)))
        self._requests.leave(stream, sample)

    def request_session_timeout(self, milliseconds: int) -> None:
        """Ask the engine to end our requests after this much silence, if it supports that."""
        if self.welcome.protocol >= (1, 9):
            self._socket.post(encode(Ping(session_timeout_ms=milliseconds)))

    def fail(self, error: NanocoreError) -> None:
        """End the session with this error for everything that waits. Only the first call has an
        effect."""
        if self._final_error is not None:
            return
        self.first_error = self.first_error or error
        self._final_error = error
        self._task.cancel()
        self.release()
        self._requests.fail(error)
        self.calls.fail(error)

    async def close(self) -> None:
        """Say BYE and close. Idempotent."""
        if self.error is None:
            self._socket.post(encode(Bye(reason="the client is done")))
        self.fail(ClientStateError("this client was closed"))
        await asyncio.gather(self._task, return_exceptions=True)

    def release(self) -> None:
        """Free the socket without BYE, from any event loop. Idempotent."""
        self._timer.cancel()
        self._socket.close()

    def _check_open(self) -> None:
        if self.error is not None:
            raise self.error

    async def _send_message(self, message: Message) -> None:
        self._check_open()
        await self._send(encode(message))

    async def _send(self, frames: list[bytes]) -> None:
        # Wait for space in the socket, but only while the session is open.
        if self._socket.send_nowait(frames):
            return
        sending = asyncio.ensure_future(self._socket.send(frames))
        try:
            await asyncio.wait({sending, self._task}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            sending.cancel()  # no effect if it is sent
        self._check_open()
        if sending.done():
            sending.result()

    async def _receive_loop(self) -> None:
        # However receiving ends, all waits must end, too.
        try:
            try:
                await self._receive()
            except NanocoreError as error:
                self.fail(await self._diagnosed(error))
        except Exception as error:
            self.fail(ProtocolError(f"receiving failed: {type(error).__name__}: {error}"))

    async def _receive(self) -> NoReturn:
        while True:
            frames = await self._socket.receive()
            self.take(frames)
            num_bytes = len(frames[-1])
            for _ in range(_MAX_BATCH):
                if num_bytes > _MAX_BATCH_BYTES:
                    await asyncio.sleep(0)  # receiving did not suspend, so no other task has run
                    break
                if (more := self._socket.receive_nowait()) is None:
                    break
                self.take(more)
                num_bytes += len(more[-1])
            else:
                await asyncio.sleep(0)

    async def _diagnosed(self, error: NanocoreError) -> NanocoreError:
        """Return the error for waiting callers; after a lost connection, the diagnosis."""
        is_loss = isinstance(error, ConnectionLostError) or getattr(error, "code", "") == NO_SESSION
        if not is_loss or self._diagnose is None:
            return error
        self.first_error = error
        self.release()
        # Requests do not wait for the diagnosis: they continue as soon as there is an engine.
        self._requests.hand_over(error)
        return await self._diagnose(error) if self._requests or self.calls else error

    def take(self, frames: list[bytes]) -> None:
        """Handle a message; raises ProtocolError if the frames are not a message."""
        self._heard_s = self._loop.time()
        self._handle(self._decoder.decode(frames))

    def check_silence(self) -> None:
        """End the session if the engine is silent; called by the timer."""
        deadline_s = self._heard_s + self._timeout_s
        if self._loop.time() < deadline_s:
            self._timer = self._loop.call_at(deadline_s, self.check_silence)
        elif self._suspected_s != self._heard_s:
            self._suspected_s = self._heard_s
            self._timer = self._loop.call_later(GRACE_S, self.check_silence)
        else:
            self.fail(EngineDeadError(f"the engine has been silent for {self._timeout_s:g} s"))

    def _handle(self, message: Message) -> None:
        match message:
            case Output():
                self._requests.deliver(message)
            case Accepted():
                self._requests.accept(message)
            case Error():
                self._handle_error(message)
            case Ping(nonce=nonce):
                self._socket.post(encode(Pong(nonce=nonce)))
            case Pong() | Reply():
                self.calls.resolve(message)
            case Draining():
                self.is_draining = True
            case Bye(reason=reason):
                raise EngineStoppedError(f"the engine has stopped: {reason}")

    def _handle_error(self, error: Error) -> None:
        exception = exception_for(error.code, error.message, error.retry_after_s)
        if error.code == NO_SESSION:  # its text describes the message that we sent
            text = f"the engine does not know this session any more ({error.message})"
            raise ProtocolError(text, NO_SESSION)
        if error.code == "engine_dead" or error.request_id is None:
            raise exception
        self._requests.refuse(error.request_id, exception)
