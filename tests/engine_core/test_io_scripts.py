"""The message handler against random mixtures of what several peers may send, do, and fail to
do.
"""

from __future__ import annotations

import struct
import sys
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanocore.demo_model import demo_model_folder
from nanocore.engine_core.io.control_handler import ServedFiles
from nanocore.engine_core.mailbox import AddRequest
from nanocore.protocol.codec import encode
from nanocore.protocol.messages import Abort, Bye, Op, Submit
from nanocore.protocol.sockets.options import SendResult
from tests.campaign import examples
from tests.engine_core.io_script import Kind, Record, ScriptRunner
from tests.engine_core.scripted_io import Io
from tests.protocol.samples import ENGINE_MESSAGES

FILES = ServedFiles(demo_model_folder())
REQUEST_IDS = st.sampled_from(["r", "s", "\u202e", "\U0001f4a9" * 256, "x" * 257, "", "y" * 2000])
VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**63), 2**64 - 1),
    st.floats(),
    st.text(max_size=5),
    st.binary(max_size=9),
    st.lists(st.integers(0, 3), max_size=3),
    REQUEST_IDS,
    st.sampled_from([[1] * 200, {"max_tokens": 3}, {"temperature": -1.0}, ["r", "s"], {}]),
)
PROMPTS = st.sampled_from([struct.pack("<2i", 1, 2), b"", b"\1", b"\xff" * 4, b"\1\0\0\0" * 70])
OUTPUTS = {"output_token_ids": struct.pack("<2i", 1, 2)}
MORE = [{}, {}, OUTPUTS, {**OUTPUTS, "sampling": {"max_tokens": 2}}, {"timeout_s": 3.0}]


@st.composite
def bodies(draw: st.DrawFn) -> tuple[int, dict[str, Any]]:
    """(op, body) of a valid message, more or less."""
    op = draw(st.sampled_from([Op.SUBMIT] * 4 + [Op.HELLO, Op.ABORT, Op.PING, Op.PONG, Op.CONTROL]))
    match op:
        case Op.SUBMIT:
            body = {"request_id": draw(REQUEST_IDS), "prompt_token_ids": draw(PROMPTS)}
            body |= draw(st.sampled_from(MORE))
        case Op.HELLO:
            body = {"protocol": draw(st.sampled_from([[1, 4], [1, 0], [2, 0], [1, 99]]))}
        case Op.ABORT:
            body = {"request_ids": draw(st.lists(REQUEST_IDS, max_size=4))}
        case Op.CONTROL:
            operations = ["stats", "pause", "read_file", "\0" * 3000, "__class__"]
            body = {"call_id": 1, "operation": draw(st.sampled_from(operations))}
        case _:
            body = {"nonce": 1}
    return op, body


@st.composite
def messages(draw: st.DrawFn) -> Record:
    """A message of a peer: valid, with a wrong field, with wrong bytes, or no message at all."""
    peer = draw(st.integers(0, 2))
    op, body = draw(bodies())
    match draw(
        st.sampled_from(["valid"] * 4 + ["field", "bytes", "cut", "noise", "frames", "bye"])
    ):
        case "field":
            names = st.sampled_from(
                [*body, "sampling", "cache_salt", *OUTPUTS, "timeout_s", "priority", "offset", "x"]
            )
            body[draw(names)] = draw(VALUES)
        case "bytes":
            data = bytearray(msgspec.msgpack.encode(body))
            data[draw(st.integers(0, len(data) - 1))] = draw(st.integers(0, 255))
            return Kind.TO_ENGINE, peer, op, bytes(data)
        case "cut":
            data = bytearray(msgspec.msgpack.encode(body))
            return Kind.TO_ENGINE, peer, op, bytes(data[: draw(st.integers(0, len(data)))])
        case "noise":
            op = draw(st.integers(0, 255))
            return Kind.TO_ENGINE, peer, op, draw(st.binary(max_size=30))
        case "frames":
            return Kind.RAW_FRAMES, peer, draw(st.integers(0, 6)), draw(st.binary(max_size=30))
        case "bye":
            op, body = Op.BYE, {}
    return Kind.TO_ENGINE, peer, op, msgspec.msgpack.encode(body)


@st.composite
def happenings(draw: st.DrawFn) -> Record:
    """A step's outputs, a peer that stops reading or goes, time."""
    kind = draw(st.sampled_from([Kind.STEP, Kind.STEP, Kind.SOCKET_STATE, Kind.TIME]))
    return kind, draw(st.integers(0, 2)), draw(st.integers(0, 40)), b""


HELLOS: list[Record] = [
    (Kind.TO_ENGINE, peer, Op.HELLO, msgspec.msgpack.encode({"protocol": [1, 3]}))
    for peer in (1, 2)
]


@given(st.lists(st.one_of(messages(), messages(), messages(), happenings()), max_size=30))
@settings(max_examples=examples(100), deadline=None, derandomize=True)
def test_whatever_peers_do_the_tables_agree_and_every_submit_has_one_answer(
    script: list[Record],
) -> None:
    runner = ScriptRunner(FILES)
    runner.run([*HELLOS, *script])
    runner.leave()


@given(st.sampled_from(ENGINE_MESSAGES), st.data())
@settings(max_examples=examples(100), deadline=None, derandomize=True)
def test_whatever_an_engine_sends_a_client_meets_no_other_error_than_the_protocols(
    message: Any, data: st.DataObject
) -> None:
    op, body = encode(message)
    spoilt = bytearray(body)
    for _ in range(data.draw(st.integers(0, 3))):
        spoilt[data.draw(st.integers(0, len(spoilt) - 1))] = data.draw(st.integers(0, 255))
    ScriptRunner(FILES).run([(Kind.TO_CLIENT, 0, op[0], bytes(spoilt))])


def test_a_clients_ids_and_handles_do_nothing_to_anothers_requests(io: Io) -> None:
    handle = io.submit("mine")
    for frames in (encode(Abort(request_ids=["mine", str(handle)])), encode(Bye())):
        io.receive_frames([bytes([Op.HELLO]), HELLOS[0][3]], b"b")
        io.receive_frames(frames, b"b")
    assert io.inbox.empty()
    assert io.session.requests == {"mine": [handle]}
    io.receive_frames([bytes([Op.HELLO]), HELLOS[0][3]], b"b")
    io.receive(Submit(request_id="mine", prompt_token_ids=b"\1\0\0\0"), b"b")
    added = io.next_event(AddRequest)
    assert added.request.handle != handle


@pytest.mark.parametrize("end", ["bye", "gone"])
def test_a_closed_session_is_released_with_its_backlog(io: Io, end: str) -> None:
    handle = io.submit("x")
    io.peers.state[b"a"] = SendResult.FULL
    io.step((handle, 1))
    session = io.session
    del io.session
    if end == "bye":
        io.receive(Bye())
    else:
        io.peers.state[b"a"] = SendResult.GONE
        io.flush()
    assert sys.getrefcount(session) == 2, "the name here, and the argument of getrefcount"
