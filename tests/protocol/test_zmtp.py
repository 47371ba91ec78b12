"""ZMTP's bytes, whole and in pieces, right and wrong: what comes out, and what it may cost."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanocore.protocol.errors import ProtocolError
from nanocore.protocol.sockets.options import MAX_FRAME_BYTES, MAX_FRAMES
from nanocore.protocol.sockets.zmtp import (
    _FRAME_COST_BYTES,
    MAX_COMMAND_BYTES,
    MAX_MESSAGE_BYTES,
    ROUTER,
    ZmtpReader,
    command_frame,
    pack_message,
)
from tests.campaign import examples

DEALER = command_frame(b"\5READY" + b"\x0bSocket-Type\0\0\0\6DEALER" + b"\x08Identity\0\0\0\3you")
HANDSHAKE = ROUTER.greeting + DEALER
MESSAGES = st.lists(
    st.lists(
        st.one_of(st.binary(max_size=3), st.sampled_from([bytes(255), bytes(256), bytes(70_000)])),
        min_size=1,
        max_size=MAX_FRAMES - 1,
    ),
    max_size=5,
)


def pieces(data: bytes, cuts: list[int]) -> list[bytes]:
    """The data cut at these places, modulo its length."""
    places = sorted({cut % (len(data) + 1) for cut in cuts} | {0, len(data)})
    return [data[start:end] for start, end in itertools.pairwise(places)]


def read(reader: ZmtpReader, data: bytes) -> list[list[bytes]]:
    """The messages that are complete once this has come, too."""
    messages = []
    reader.feed(memoryview(data))
    while not reader.is_drained:
        if (message := reader.next_message()) is not None:
            messages.append(message)
    return messages


def ready_reader() -> ZmtpReader:
    reader = ZmtpReader()
    assert read(reader, HANDSHAKE) == []
    assert reader.is_ready
    reader.answers.clear()
    return reader


def packed(*frames: bytes) -> bytes:
    return b"".join(pack_message(frames))


@given(MESSAGES, st.lists(st.integers(0, 2**20), max_size=20))
@settings(max_examples=examples(200), deadline=None, derandomize=True)
def test_messages_arrive_whole_however_their_bytes_are_cut(
    messages: list[list[bytes]], cuts: list[int]
) -> None:
    reader = ZmtpReader()
    stream = HANDSHAKE + b"".join(packed(*message) for message in messages)
    received = [m for piece in pieces(stream, cuts) if piece for m in read(reader, piece)]
    assert received == messages
    assert reader.answers == [ROUTER.ready]
    assert reader.num_bytes == 0


def test_messages_arrive_whole_byte_by_byte() -> None:
    messages = [[b"\x20", b"\x80"], [b""], [b"x" * 300, b"", b"y"]]
    reader = ZmtpReader()
    stream = HANDSHAKE + b"".join(packed(*message) for message in messages)
    assert [m for byte in stream for m in read(reader, bytes([byte]))] == messages
    assert reader.num_bytes == 0


@given(st.binary(max_size=200), st.lists(st.integers(0, 200), max_size=5))
@settings(max_examples=examples(300), deadline=None, derandomize=True)
def test_noise_behind_the_handshake_is_messages_or_an_error_of_the_protocol(
    noise: bytes, cuts: list[int]
) -> None:
    reader = ready_reader()
    try:
        for piece in pieces(noise, cuts):
            for message in read(reader, piece):
                assert 1 <= len(message) < MAX_FRAMES
    except ProtocolError:
        pass
    assert reader.num_bytes <= len(noise)


@given(st.binary(max_size=100), st.integers(0, len(HANDSHAKE)))
@settings(max_examples=examples(300), deadline=None, derandomize=True)
def test_noise_in_the_handshake_is_an_error_or_waits_for_more(noise: bytes, place: int) -> None:
    reader = ZmtpReader()
    try:
        read(reader, HANDSHAKE[:place] + noise)
    except ProtocolError:
        assert not reader.is_ready or len(noise) >= 2


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"GET / HTTP/1.1\r\n", "greeting"),
        (b"\1\0\6\0hello", "greeting"),
        (ROUTER.greeting[:10] + b"\1\5" + b"\0\0", "before 3.0"),
        (ROUTER.greeting.replace(b"NULL ".strip(), b"PLAI"), "mechanism"),
        (ROUTER.greeting[:12] + b"CURVE".ljust(20, b"\0") + bytes(32), "mechanism"),
        (ROUTER.greeting + packed(b"too early"), "before READY"),
        (ROUTER.greeting + command_frame(b"\5HELLO"), "without READY"),
        (ROUTER.greeting + command_frame(b"\5READY"), "not one of .*DEALER"),
        (ROUTER.greeting + DEALER.replace(b"\6DEALER", b"\6SERVER"), "not one of .*DEALER"),
        (ROUTER.greeting + command_frame(b"\5READY\x0bSocket-Type\0\0\0\7DEALER"), "cut short"),
        (ROUTER.greeting + command_frame(b"\5READY\xff"), "cut short"),
        (HANDSHAKE + b"\x08\0", "wrong flags"),
        (HANDSHAKE + b"\x05\0", "wrong flags"),
        (HANDSHAKE + b"\xff" * 20, "wrong flags"),
        (HANDSHAKE + b"\6" + (MAX_COMMAND_BYTES + 1).to_bytes(8, "big"), "too long"),
        (HANDSHAKE + b"\2" + (MAX_FRAME_BYTES + 1).to_bytes(8, "big"), "more than"),
        (HANDSHAKE + b"\2" + b"\xff" * 8, "more than"),
        (HANDSHAKE + command_frame(b"\5ERROR\0"), "reports an error"),
    ],
)
def test_who_breaks_the_rules_gets_an_error(data: bytes, words: str) -> None:
    with pytest.raises(ProtocolError, match=words):
        read(ZmtpReader(), data)


def test_commands_that_mean_nothing_here_are_ignored_and_a_ping_is_answered() -> None:
    reader = ready_reader()
    stream = command_frame(b"\x09SUBSCRIBEtopic") + command_frame(b"") + packed(b"x")
    assert read(reader, stream) == [[b"x"]]
    assert reader.answers == []
    assert read(reader, command_frame(b"\4PING\0\1context")) == []
    assert reader.answers == [command_frame(b"\4PONGcontext")]


def test_a_flood_of_pings_is_answered_with_few_pongs() -> None:
    reader = ready_reader()
    assert read(reader, command_frame(b"\4PING\0\1" + b"c" * 200) * 500) == []
    assert reader.answers == [command_frame(b"\4PONG" + b"c" * 16)] * 2


def test_a_length_that_is_announced_costs_nothing_before_its_bytes_have_come() -> None:
    reader = ready_reader()
    assert read(reader, b"\3" + MAX_FRAME_BYTES.to_bytes(8, "big") + b"x" * 100) == []
    assert reader.num_bytes == 100
    assert len(reader._partial) == 100
    assert reader._partial.__sizeof__() < 1000


def test_the_largest_message_arrives_and_one_byte_more_is_an_error() -> None:
    reader = ready_reader()
    assert [len(f) for f in read(reader, packed(b"\x10", bytes(MAX_FRAME_BYTES)))[0]] == [
        1,
        MAX_FRAME_BYTES,
    ]
    room = MAX_MESSAGE_BYTES - MAX_FRAME_BYTES - 3 * _FRAME_COST_BYTES
    head = b"\3" + MAX_FRAME_BYTES.to_bytes(8, "big")
    assert read(reader, head + bytes(MAX_FRAME_BYTES)) == []
    rest = b"\3" + room.to_bytes(8, "big") + bytes(room)
    assert len(read(reader, rest + b"\2" + bytes(8))[0]) == 3
    assert read(reader, head + bytes(MAX_FRAME_BYTES)) == []
    with pytest.raises(ProtocolError, match="more than"):
        read(reader, rest + b"\2" + (1).to_bytes(8, "big"))


def test_frames_beyond_those_that_are_kept_are_dropped_as_they_come() -> None:
    reader = ready_reader()
    long = b"\3" + (2**20).to_bytes(8, "big")
    assert read(reader, b"\1\1x" * (MAX_FRAMES - 1)) == []
    for _ in range(3):
        for part in (long, bytes(2**19), bytes(2**19)):
            assert read(reader, part) == []
            assert reader.num_bytes < 100
    assert read(reader, b"\0\1y" + packed(b"next")) == [[b"x"] * (MAX_FRAMES - 1), [b"next"]]


def test_an_endless_message_of_small_frames_ends_in_an_error_and_each_call_soon() -> None:
    reader = ready_reader()
    num_frames = MAX_MESSAGE_BYTES // _FRAME_COST_BYTES
    reader.feed(memoryview(b"\1\0" * num_frames))
    num_calls = 0
    while not reader.is_drained:
        before = reader._at
        assert reader.next_message() is None
        num_calls += 1
        assert reader.is_drained or reader._at - before <= 2 * 1000
    assert num_calls >= num_frames // 1000
    with pytest.raises(ProtocolError, match="more than"):
        read(reader, b"\1\0")
