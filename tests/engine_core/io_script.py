"""Scripts for an io thread: what peers do to it, step by step, and what must hold after each.

A script is a list of records: (kind, peer, op, body). Tests draw them at random, tools/fuzz reads
them from bytes. Whatever the script, no exception may come out of it, and

- the tables of sessions, requests and slow clients agree, and so do their limits;
- an answer goes to the peer that sent the message, and is short;
- a SUBMIT in a session, with an id that can be read, is answered exactly once, by that id.
"""

from __future__ import annotations

import enum
from typing import Final

import msgspec

from nanocore.engine_core.io.model_files import ModelFiles
from nanocore.engine_core.io.session import Session
from nanocore.engine_core.mailbox import ControlCall, ControlReply
from nanocore.protocol.codec import client_decoder, encode, unpack_output
from nanocore.protocol.errors import ProtocolError
from nanocore.protocol.messages import Accepted, Error, Op, Output, Reply
from nanocore.protocol.sockets import SendResult
from tests.engine_core.scripted_io import Io

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
    """Runs one script on a fresh io thread; peer "a" is in session already."""

    def __init__(self, files: ModelFiles) -> None:
        self.io = Io(files)
        self._now_s = self.io.session.last_seen_s

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
                    self.io.socket.state[PEERS[peer]] = _STATES[op % 3]
                case Kind.TIME:
                    self._pass_time(op)
                case Kind.TO_CLIENT:
                    send_to_client([bytes([op]), body])
            self.io.check_tables()

    def leave(self) -> None:
        """Every peer says BYE; nothing of them may stay."""
        for routing_id in PEERS:
            self._send_to_engine(routing_id, encode_bye())
        thread = self.io.thread
        tables = [thread._sessions, thread._clients, thread._slow, thread._request_ids]
        assert not any(tables)
        self.io.outbox.close()

    def _send_to_engine(self, routing_id: bytes, frames: list[bytes]) -> None:
        io = self.io
        io.socket.sent.clear()
        session = io.thread._sessions.get(routing_id)
        others = set(io.thread._request_ids)
        others -= set() if session is None else set(session.requests.values())
        num_held_back = _num_held_back(session)
        io.thread._take(routing_id, frames)  # what `_receive` calls, without its last resort
        for to, message in io.socket.sent:
            assert to == routing_id, "an answer to somebody else"
            if not isinstance(message, Output) and not isinstance(message, Reply):
                assert sum(map(len, encode(message))) < MAX_ANSWER_BYTES
        assert others <= io.thread._request_ids.keys(), "somebody else's request is gone"
        if session is not None and io.thread._sessions.get(routing_id) is session:
            self._check_answers(frames, _num_held_back(session) - num_held_back)

    def _check_answers(self, frames: list[bytes], num_held_back: int) -> None:
        """What was answered to a message in a session that goes on."""
        if len(frames) != 2 or frames[0] != bytes([Op.SUBMIT]):
            return
        answers = [m for _, m in self.io.socket.sent if isinstance(m, (Accepted, Error))]
        assert len(answers) + num_held_back == 1, "a SUBMIT is answered once"
        try:
            request_id = _ID_DECODER.decode(frames[1]).request_id
        except Exception:
            return
        if answers and len(request_id) <= 1024:
            # An error of the bytes, before their fields are looked at, names no request.
            assert answers[0].request_id in (request_id, None)

    def _step(self, routing_id: bytes, finish: int) -> None:
        session = self.io.thread._sessions.get(routing_id)
        while not self.io.inbox.empty():
            event = self.io.inbox.get_nowait()
            if isinstance(event, ControlCall):
                self.io.thread._deliver(ControlReply(event.client, Reply(call_id=event.call_id)))
        if session is not None and session.requests:
            handles = list(session.requests.values())
            tokens = [(handle, 1) for handle in handles]
            self.io.step(*tokens, finish=tuple(handles[: finish % 3]), client=session.client)

    def _pass_time(self, seconds: int) -> None:
        self._now_s += seconds
        for session in list(self.io.thread._slow.values()):
            self.io.thread._flush(session, self._now_s)
        self.io.thread._check_sessions(self._now_s)


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


def _num_held_back(session: Session | None) -> int:
    return 0 if session is None or session.backlog is None else len(session.backlog._answers)
