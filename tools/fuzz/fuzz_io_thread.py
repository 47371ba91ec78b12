"""Coverage-guided fuzzing of the io thread and of the client's decoder, with atheris.

    python tools/fuzz/fuzz_io_thread.py [CORPUS_FOLDER] [libFuzzer's flags, e.g. -max_total_time=60]

An input is a script of records, each a kind, a peer, an op byte and a body: messages of three peers
to an engine's io thread over a scripted socket, outputs of steps, peers that stop reading or
vanish, and messages of an engine to a client. Any exception but the documented ones is a finding,
and so are tables that disagree, a SUBMIT that is not answered exactly once, and a long answer.
"""

from __future__ import annotations

import enum
import random
import struct
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import atheris

sys.path.insert(0, str(Path(__file__).parents[2]))
with atheris.instrument_imports(include=["nanocore"]):
    from nanocore.engine_core import io_thread as module
    from nanocore.engine_core.model_files import ModelFiles
    from nanocore.protocol import codec
    from nanocore.protocol.errors import ProtocolError
    from nanocore.protocol.messages import Accepted, Error, Output
    from nanocore.protocol.sockets import SendResult
    from tests.engine_core.scripted_io import Io

import msgspec

from nanocore.engine_core.mailbox import AddRequest

HEADER = struct.Struct("<BBBH")
PEERS = [b"a", b"b", b"c"]
STATES = list(SendResult)
MAX_ANSWER_BYTES = 8192  # of anything but an OUTPUT or a file's chunk
SUBMIT_OP = 0x10


class Kind(enum.IntEnum):
    """What a record is."""

    TO_ENGINE = 0  # a message of a peer
    RAW_FRAMES = 1  # the body cut into frames of op % 7 + 1 bytes
    STEP = 2  # a token for every request of the peer, and the end of the first op % 3
    SOCKET_STATE = 3  # the peer reads (0), does not (1), is gone (2)
    TIME = 4  # op seconds go by
    TO_CLIENT = 5  # a message of an engine


class _Id(msgspec.Struct):
    request_id: str


_ID_DECODER = msgspec.msgpack.Decoder(_Id)


def records(data: bytes) -> Iterator[tuple[int, int, int, bytes]]:
    """(kind, peer, op, body) of each record of a script; the last body may be cut short."""
    offset = 0
    while offset + HEADER.size <= len(data):
        kind, peer, op, num_bytes = HEADER.unpack_from(data, offset)
        offset += HEADER.size
        yield kind % len(Kind), peer % 3, op, data[offset : offset + num_bytes]
        offset += num_bytes


class Script:
    """Runs one script on a fresh io thread and checks what must hold."""

    def __init__(self, files: ModelFiles) -> None:
        self._io = Io(files)
        self._now_s = self._io.session.last_seen_s

    def run(self, data: bytes) -> None:
        """Run all records."""
        for kind, peer, op, body in records(data):
            match kind:
                case Kind.TO_ENGINE:
                    self._send_to_engine(PEERS[peer], [bytes([op]), body])
                case Kind.RAW_FRAMES:
                    size = op % 7 + 1
                    frames = [body[i : i + size] for i in range(0, len(body), size)]
                    self._send_to_engine(PEERS[peer], frames[:8])
                case Kind.STEP:
                    self._step(peer, op)
                case Kind.SOCKET_STATE:
                    self._io.socket.state[PEERS[peer]] = STATES[op % 3]
                case Kind.TIME:
                    self._pass_time(op)
                case Kind.TO_CLIENT:
                    send_to_client([bytes([op]), body])
            self._io.check_tables()
        self._io.outbox.close()

    def _send_to_engine(self, routing_id: bytes, frames: list[bytes]) -> None:
        io = self._io
        io.socket.sent.clear()
        before = set(io.thread._request_ids)
        io.thread._take(routing_id, frames)  # what `_receive` calls, without its last resort
        for to, message in io.socket.sent:
            assert to == routing_id, "an answer to somebody else"
            num_bytes = sum(map(len, codec.encode(message)))
            if not isinstance(message, Output) and getattr(message, "data", None) is None:
                assert num_bytes < MAX_ANSWER_BYTES, f"{num_bytes} bytes of {message.op.name}"
        session = io.thread._sessions.get(routing_id)
        own = set() if session is None else set(session.requests.values())
        assert set(io.thread._request_ids) - before <= own, "a request of somebody else's"
        if len(frames) == 2 and frames[0] == bytes([SUBMIT_OP]) and session is not None:
            self._check_submit(frames[1], session.backlog is not None)

    def _check_submit(self, body: bytes, held_back: bool) -> None:
        try:
            request_id = _ID_DECODER.decode(body).request_id
        except Exception:
            return
        if held_back or len(request_id) > 1024:
            return
        answers = [m for _, m in self._io.socket.sent if isinstance(m, (Accepted, Error))]
        assert len(answers) == 1, f"{len(answers)} answers to one SUBMIT"
        # Bytes that end too early are no message; the id in them is not looked for.
        assert answers[0].request_id in (request_id, None)

    def _step(self, peer: int, finish: int) -> None:
        session = self._io.thread._sessions.get(PEERS[peer])
        while not self._io.inbox.empty():
            event = self._io.inbox.get_nowait()
            assert not isinstance(event, AddRequest) or event.request.num_tokens > 0
        if session is not None and session.requests:
            handles = list(session.requests.values())
            self._io.step(
                *((handle, 1) for handle in handles),
                finish=tuple(handles[: finish % 3]),
                client=session.client,
            )

    def _pass_time(self, ticks: int) -> None:
        self._now_s += ticks
        for session in list(self._io.thread._slow.values()):
            self._io.thread._flush(session, self._now_s)
        self._io.thread._check_sessions(self._now_s)


_CLIENT_DECODER = codec.client_decoder()


def send_to_client(frames: list[bytes]) -> None:
    """Decode what an engine would have sent, as the client does."""
    try:
        message = _CLIENT_DECODER.decode(frames)
        if isinstance(message, Output):
            codec.unpack_output(message)
    except ProtocolError:
        pass


def mutate(data: bytes, max_size: int, seed: int) -> bytes:
    """Half of the time libFuzzer's own mutation; else one value of one msgpack body changes."""
    rng = random.Random(seed)
    script = list(records(data))
    if not script or rng.random() < 0.5:
        return atheris.Mutate(data, max_size)
    index = rng.randrange(len(script))
    kind, peer, op, body = script[index]
    try:
        fields = msgspec.msgpack.decode(body)
        key = rng.choice(list(fields))
        fields[key] = rng.choice(
            [None, -1, 0, 2**31, 2**53, 2**64 - 1, 1.0, float("nan"), "", "x" * 300, b"", b"\1\0\0",
             b"\1\0\0\0", [], [fields[key]], {}, {"x": fields[key]}, True, *fields.values()]
        )  # fmt: skip
        body = msgspec.msgpack.encode(fields)
    except Exception:
        body = atheris.Mutate(body, len(body) + 16)
    script[index] = (kind, peer, op, body[:65535])
    if rng.random() < 0.2:
        script.insert(rng.randrange(len(script) + 1), rng.choice(script))
    return encode_script(script)[:max_size]


def encode_script(script: list[tuple[int, int, int, bytes]]) -> bytes:
    """The input that `records` reads."""
    return b"".join(
        HEADER.pack(kind, peer, op, len(body)) + body for kind, peer, op, body in script
    )


def seeds() -> Iterator[bytes]:
    """One script for every sample message of either side, in an open session."""
    from tests.protocol.samples import CLIENT_MESSAGES, ENGINE_MESSAGES

    hello = (Kind.TO_ENGINE, 1, 0x01, msgspec.msgpack.encode({"protocol": [1, 3]}))
    body = msgspec.msgpack.encode({"request_id": "r", "prompt_token_ids": b"\1\0\0\0"})
    submit = (Kind.TO_ENGINE, 1, SUBMIT_OP, body)
    stops_reading, reads_again = ((Kind.SOCKET_STATE, 1, state, b"") for state in (1, 0))
    for message in CLIENT_MESSAGES:
        op, body = codec.encode(message)
        own = (Kind.TO_ENGINE, 1, op[0], body)
        yield encode_script([hello, own, (Kind.STEP, 1, 1, b""), own])
        held_back = [stops_reading, own, (Kind.STEP, 1, 0, b""), reads_again]
        yield encode_script([hello, submit, *held_back, (Kind.TIME, 0, 1, b"")])
    for message in ENGINE_MESSAGES:
        op, body = codec.encode(message)
        yield encode_script([(Kind.TO_CLIENT, 0, op[0], body)])
    yield encode_script(
        [hello, submit, (Kind.SOCKET_STATE, 1, 2, b""), submit, (Kind.TIME, 0, 40, b"")]
    )
    yield encode_script([(Kind.RAW_FRAMES, 0, 1, b"\x10\x80\x80"), (Kind.RAW_FRAMES, 0, 0, b"")])


def main() -> None:
    """Write the seeds into the corpus folder, then fuzz."""
    corpus = next((Path(a) for a in sys.argv[1:] if not a.startswith("-")), None)
    if corpus is not None:
        corpus.mkdir(parents=True, exist_ok=True)
        for number, seed in enumerate(seeds()):
            (corpus / f"seed-{number:02}").write_bytes(seed)
    folder = Path(tempfile.mkdtemp(prefix="nc-fuzz-"))
    (folder / "tokenizer.json").write_bytes(b"{}" * 40_000)
    files = ModelFiles(folder)
    module.logger.disabled = True

    def test_one_input(data: bytes) -> None:
        Script(files).run(data)

    atheris.Setup(sys.argv, test_one_input, custom_mutator=mutate)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
