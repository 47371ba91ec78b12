"""Scripts for a message handler: what peers do to it, step by step, and what must hold after each.

A script is a list of records: (kind, peer, op, body). Tests draw them at random, tests/fuzz reads
them from bytes. Whatever the script, no exception may come out of it, and

- the tables of sessions, requests and slow clients agree, and so do their limits;
- an answer goes to the peer that sent the message, and is short;
- a SUBMIT in a session, with an id that can be read, is answered exactly once, by that id.
"""

from __future__ import annotations

import enum
from typing import Final

import msgspec

from nanocore.engine_core.io.control_handler import ServedFiles
from nanocore.engine_core.io.session import Session
from nanocore.engine_core.mailbox import ControlCall, ControlReply
from nanocore.protocol.codec import client_decoder, encode, unpack_output
from nanocore.protocol.errors import ProtocolError
from nanocore.protocol.messages import Accepted, Error, Message, Op, Output, Reply
from nanocore.protocol.sockets.options import SendResult
from tests.engine_core.scripted_io import Io, waiting_siblings

PEERS: Final = [b"a", b"b", b"c"]
MAX_ANSWER_BYTES: Final = 8192  # of anything but an OUTPUT or a file's chunk
_STATES: Final = list(SendResult)


class Kind(enum.IntEnum):
    """What a record is."""

    TO_ENGINE = 0  # a message of the peer
    RAW_FRAMES = 1  # the body cut into frames of op % 7 + 1 bytes
    STEP = 2  # a token for every request of the peer, and the end of the first op % 3
    SOCKET_STATE = 3  # the peer reads (op 0), does not (1), is gone (2)
    TIME = 4  # op seconds go by
    TO_CLIENT = 5  # a message of an engine


Record = tuple[Kind, int, int, bytes]


class _Id(msgspec.Struct):
    request_id: str


_ID_DECODER = msgspec.msgpack.Decoder(_Id)
_CLIENT_DECODER = client_decoder()


class ScriptRunner:
    """Runs one script on a fresh desk; peer "a" is in session already."""

    def __init__(self, files: ServedFiles) -> None:
        self.io = Io(files)

    def run(self, script: list[Record]) -> None:
        """Run all records."""
        for kind, peer, op, body in script:
            match kind:
                case Kind.TO_ENGINE:
                    self._send_to_engine(PEERS[peer], [bytes([op]), body])
                case Kind.RAW_FRAMES:
                    size = op % 7 + 1
                    frames = [body[i : i + size] for i in range(0, len(body), size)]
                    self._send_to_engine(PEERS[peer], frames[:7])
                case Kind.STEP:
                    self._step(PEERS[peer], op)
                case Kind.SOCKET_STATE:
                    self.io.peers.state[PEERS[peer]] = _STATES[op % 3]
                case Kind.TIME:
                    self._pass_time(op)
                case Kind.TO_CLIENT:
                    send_to_client([bytes([op]), body])
            self.io.check_tables()

    def leave(self) -> None:
        """Every peer says BYE; nothing of them may stay."""
        for routing_id in PEERS:
            self._send_to_engine(routing_id, encode_bye())
        table = self.io.handler.sessions
        assert not any([table.by_peer, table.by_client, table.slow, table.request_ids])
        self.io.outbox.close()

    def _send_to_engine(self, routing_id: bytes, frames: list[bytes]) -> None:
        io, sessions = self.io, self.io.handler.sessions
        io.peers.sent.clear()
        session = sessions.by_peer.get(routing_id)
        others = set(sessions.request_ids)
        others -= (
            set() if session is None else {h for own in session.requests.values() for h in own}
        )
        num_held_back = len(_answers_held_back(session))
        io.receive_frames(frames, routing_id)
        io.compile(len(io.grammars.waiting))
        for to, message in io.peers.sent:
            assert to == routing_id, "an answer to somebody else"
            _check_size(message)
        assert others <= sessions.request_ids.keys(), "somebody else's request is gone"
        if session is not None and sessions.has(session):
            held = _answers_held_back(session)[num_held_back:]
            for message in held:
                _check_size(message)
            self._check_answers(frames, [message for _, message in io.peers.sent] + held)

    def _check_answers(self, frames: list[bytes], messages: list[Message]) -> None:
        """What was answered, at once or later, to a message in a session that goes on."""
        if len(frames) != 2 or frames[0] != bytes([Op.SUBMIT]):
            return
        answers = [message for message in messages if isinstance(message, (Accepted, Error))]
        assert len(answers) == 1, "a SUBMIT is answered once"
        try:
            request_id = _ID_DECODER.decode(frames[1]).request_id
        except Exception:
            return
        if len(request_id) <= 1024:
            # An error of the bytes, before their fields are looked at, names no request.
            assert answers[0].request_id in (request_id, None)

    def _step(self, routing_id: bytes, finish: int) -> None:
        io = self.io
        while not io.inbox.empty():
            event = io.inbox.get_nowait()
            if isinstance(event, ControlCall):
                reply = ControlReply(event.client, Reply(call_id=event.call_id))
                io.handler.deliver(reply, io.now_s)
        session = io.handler.sessions.by_peer.get(routing_id)
        if session is not None and session.requests:
            handles = [handle for own in session.requests.values() for handle in own]
            tokens = [(handle, 1) for handle in handles]
            io.step(*tokens, finish=tuple(handles[: finish % 3]), client=session.client)

    def _pass_time(self, seconds: int) -> None:
        self.io.now_s += seconds
        self.io.handler.requests.end_overdue(self.io.now_s)
        self.io.flush()
        self.io.check_sessions()


def encode_bye() -> list[bytes]:
    """The frames of a BYE."""
    return [bytes([Op.BYE]), b"\x80"]


def send_to_client(frames: list[bytes]) -> None:
    """Decode what an engine would have sent, as the client does."""
    try:
        message = _CLIENT_DECODER.decode(frames)
        if isinstance(message, Output):
            unpack_output(message)
    except ProtocolError:
        pass


def _check_size(message: Message) -> None:
    if not isinstance(message, (Output, Reply)):
        assert sum(map(len, encode(message))) < MAX_ANSWER_BYTES


def _answers_held_back(session: Session | None) -> list[Message]:
    """What waits for this client, but for the tokens, which come last."""
    messages = [_CLIENT_DECODER.decode(frames) for frames in waiting_siblings(session)]
    return [message for message in messages if not isinstance(message, Output)]
