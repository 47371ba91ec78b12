"""A client that conformance checks drive by hand: plain maps out, typed messages in.

It answers PING, keeps the table of streams, and waits for each answer no longer than its test's
patience. An engine answers messages in their order, so a PING's PONG proves that what was sent
before it got no answer: no check needs to sleep.
"""

from __future__ import annotations

import time
from contextlib import suppress
from typing import Any, TypeVar

import msgspec

from nanocore.protocol.codec import (
    InvalidSubmitError,
    client_decoder,
    engine_decoder,
    pack_int32,
)
from nanocore.protocol.errors import ProtocolError, shorten
from nanocore.protocol.messages import (
    ADMIN_OPERATIONS,
    PROTOCOL_VERSION,
    Accepted,
    Error,
    Message,
    Op,
    Output,
    Ping,
    Pong,
    Reply,
    Submit,
    Welcome,
)
from nanocore_conformance.checked_streams import CheckedStreams, Stream
from nanocore_conformance.peer_socket import PeerSocket
from nanocore_conformance.report import BrokenError, SkippedError, require

Expected = TypeVar("Expected", bound=Message)
Body = dict[str, Any]
PROMPT = [1, 2, 3]
_SHOWN_BYTES = 40


def submit_body(request_id: str, prompt: list[int] | None = None, **sampling: object) -> Body:
    """A SUBMIT: greedy and of four tokens, unless `sampling` says otherwise."""
    return {
        "request_id": request_id,
        "prompt_token_ids": pack_int32(PROMPT if prompt is None else prompt),
        "sampling": {"temperature": 0.0, "ignore_eos": True, "max_tokens": 4} | sampling,
    }


class Peer:
    """One connection. handles: those seen by all peers of the run, to which it adds its own."""

    def __init__(self, socket: PeerSocket, patience_s: float, handles: set[int]) -> None:
        self._socket = socket
        self._patience_s = patience_s
        self._handles = handles
        self._decoder, self._own_decoder = client_decoder(), engine_decoder()
        self._submits: dict[str, Submit] = {}
        self._nonce = 1_000_000
        self._welcome: Welcome | None = None
        self._streams = CheckedStreams(0, 0)

    @property
    def welcome(self) -> Welcome:
        """The WELCOME of the open session."""
        assert self._welcome is not None, "hello() comes first"
        return self._welcome

    def send(self, op: Op, body: Body) -> None:
        """Send a plain map."""
        self.send_frames([bytes([op]), msgspec.msgpack.encode(body)])

    def send_frames(self, frames: list[bytes]) -> None:
        """Send anything."""
        if frames[:1] == [bytes([Op.SUBMIT])]:
            with suppress(ProtocolError, InvalidSubmitError):  # what is no request is not accepted
                submit = self._own_decoder.decode(frames)
                assert isinstance(submit, Submit)
                self._submits[submit.request_id] = submit
        self._socket.send(frames)

    def receive(self, expected: str) -> Message:
        """The next message that is no PING; what it says of streams has been taken in."""
        message = self.receive_within(self._patience_s, expected)
        if message is None:
            raise BrokenError(expected, f"nothing within {self._patience_s:g} s")
        return message

    def receive_within(self, timeout_s: float, expected: str = "a message") -> Message | None:
        """Receive a message; None if nothing comes in time."""
        deadline_s = time.monotonic() + timeout_s
        while (frames := self.receive_frames(deadline_s - time.monotonic())) is not None:
            try:
                message = self._decoder.decode(frames)
            except ProtocolError as error:
                shown = [frame[:_SHOWN_BYTES].hex() for frame in frames[:3]]
                raise BrokenError(expected, f"{error} (frames {shown})") from None
            match message:
                case Ping(nonce=nonce):
                    self.send(Op.PONG, {"nonce": nonce})
                    continue
                case Output():
                    self._streams.take(message)
                case Accepted(request_id=request_id):
                    samples = self._streams.accept(message, self._submits.get(request_id))
                    handles = {stream.handle for stream in samples}
                    new = not handles & self._handles
                    require(new, "a handle that was never given before", message)
                    require(max(handles) < 2**32, "handles of 32 bits, of all samples", message)
                    self._handles |= handles
                case Welcome():
                    self._welcome = message
                    self._streams = CheckedStreams(
                        message.model.vocab_size, message.model.max_model_len
                    )
            return message
        return None

    def receive_frames(self, timeout_s: float) -> list[bytes] | None:
        """What comes next, as it is and unanswered; None if nothing comes in time."""
        return self._socket.receive(timeout_s)

    def drain(self, quiet_s: float) -> None:
        """Throw away what comes until nothing has come for so long."""
        while self.receive_frames(quiet_s) is not None:
            pass

    def expect(self, kind: type[Expected], what: str = "") -> Expected:
        """The next message, which must be of this kind; OUTPUT may come before it."""
        expected = kind.op.name + (f" {what}" if what else "")
        while True:
            message = self.receive(expected)
            if isinstance(message, kind):
                return message
            require(isinstance(message, Output), expected, message)

    def wait_for_ping(self) -> None:
        """Wait until the engine asks a session in which nothing else happens for a sign of life."""
        timeout_s = self._patience_s + 3e-3 * self.welcome.limits.ping_interval_ms
        frames = self._socket.receive(timeout_s)
        if frames is None:
            raise BrokenError("PING", f"nothing within {timeout_s:g} s")
        require(frames[0] == bytes([Op.PING]), "PING", frames)

    def hello(self, major: int = 1, minor: int = PROTOCOL_VERSION[1]) -> Welcome:
        """Open a session."""
        self.send(Op.HELLO, {"protocol": [major, minor], "client": "nanocore-conformance"})
        return self.expect(Welcome)

    def bye(self) -> None:
        """End the session; the connection stays."""
        self.send(Op.BYE, {})

    def accepted(self, request_id: str) -> Stream:
        """Wait until a request is accepted."""
        accepted = self.expect(Accepted, f"of request_id {request_id!r}")
        require(accepted.request_id == request_id, f"ACCEPTED of {request_id!r}", accepted)
        return self._streams.by_handle[accepted.handle]

    def stream(self, request_id: str) -> Stream:
        """The newest of the streams that were accepted under this name; of samples, the last."""
        streams = [s for s in self._streams.by_handle.values() if s.request_id == request_id]
        return streams[-1]

    def submit(
        self, request_id: str, prompt: list[int] | None = None, **sampling: object
    ) -> Stream:
        """Submit a request (see `submit_body`) and wait until it is accepted."""
        self.send(Op.SUBMIT, submit_body(request_id, prompt, **sampling))
        return self.accepted(request_id)

    def finish(self, *streams: Stream) -> None:
        """Read until all of these have ended."""
        while open_ids := [s.request_id for s in streams if s.finish_reason is None]:
            self.expect(Output, f"until {open_ids} have ended")

    def complete(
        self, request_id: str, prompt: list[int] | None = None, **sampling: object
    ) -> Stream:
        """Submit a request and read it to its end."""
        stream = self.submit(request_id, prompt, **sampling)
        self.finish(stream)
        return stream

    def first_token(self, stream: Stream) -> None:
        """Read until a request has its first token."""
        while not stream.token_ids:
            self.expect(Output, f"with a token of {stream.request_id!r}")

    def refused(self, code: str, request_id: str | None = None, naming: str = "") -> Error:
        """Wait for an ERROR with this code, of this request, whose message names something."""
        named = f" and request_id {shorten(request_id)!r}" if request_id else ""
        what = f"with code {code!r}{named}"
        error = self.expect(Error, what)
        require((error.code, error.request_id) == (code, request_id), f"ERROR {what}", error)
        require(naming in error.message, f"ERROR {what} whose message names {naming!r}", error)
        return error

    def quiet(self) -> None:
        """Prove that all that was sent has been dealt with and that nothing more is answered."""
        self._nonce += 1
        self.send(Op.PING, {"nonce": self._nonce})
        pong = self.expect(Pong, f"with nonce {self._nonce}, and nothing before it")
        require(pong.nonce == self._nonce, f"PONG with nonce {self._nonce}", pong)

    def call(self, operation: str, call_id: int = 1, **fields: object) -> Reply:
        """Send a CONTROL and wait for its REPLY, which must be of this call.

        Raises:
            SkippedError: it is an administrator's, and this session is none.
        """
        if operation in ADMIN_OPERATIONS and self.welcome.role != "admin":
            raise SkippedError(f"{operation} needs the role admin")
        self.send(Op.CONTROL, {"call_id": call_id, "operation": operation} | fields)
        reply = self.expect(Reply, f"to {operation}")
        require(reply.call_id == call_id, f"REPLY with call_id {call_id}", reply)
        return reply

    def still_streams(self) -> None:
        """Prove that the session goes on: a whole request, from SUBMIT to its end."""
        self._nonce += 1
        probe = self.complete(f"probe-{self._nonce}", max_tokens=2)
        require(len(probe.token_ids) == 2, "a request of 2 tokens to go on as before", probe)

    def close(self) -> None:
        """Close the connection without BYE."""
        self._socket.close()
