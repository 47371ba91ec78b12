"""Frames: every message survives the wire, and what is no message is refused by name."""

from __future__ import annotations

import itertools
from typing import get_args

import pytest

from nanocore.protocol.codec import client_decoder, encode, engine_decoder
from nanocore.protocol.errors import ProtocolError
from nanocore.protocol.messages import (
    FROM_CLIENT,
    FROM_ENGINE,
    FinishReason,
    Message,
    Op,
    Output,
)
from tests.protocol.samples import CLIENT_MESSAGES, ENGINE_MESSAGES, directions, frames


def _label(value: object) -> str:
    return type(value).__name__


@pytest.mark.parametrize("message", CLIENT_MESSAGES, ids=_label)
def test_what_a_client_says_reaches_the_engine_unchanged(message: Message) -> None:
    assert engine_decoder().decode(encode(message)) == message


@pytest.mark.parametrize("message", ENGINE_MESSAGES, ids=_label)
def test_what_an_engine_says_reaches_the_client_unchanged(message: Message) -> None:
    assert client_decoder().decode(encode(message)) == message


def test_the_samples_cover_every_message_of_either_direction() -> None:
    assert {type(m) for m in CLIENT_MESSAGES} == set(FROM_CLIENT)
    assert {type(m) for m in ENGINE_MESSAGES} == set(FROM_ENGINE)
    assert {m.op for m in (*FROM_CLIENT, *FROM_ENGINE)} == set(Op)


def test_defaults_are_not_sent() -> None:
    assert encode(Output()) == [b"\x12", b"\x80"]


@pytest.mark.parametrize("count", [0, 1, 3, 50])
def test_any_number_of_frames_but_two_is_refused(count: int) -> None:
    for decoder, _, _ in directions():
        with pytest.raises(ProtocolError, match=f"got {count} frames") as caught:
            decoder.decode([b"\x20"] * count)
        assert caught.value.code == "protocol_error"


@pytest.mark.parametrize("op_frame", [b"", b"\x20\x20", b"\x20" * 100_000])
def test_an_op_frame_that_is_not_one_byte_is_refused(op_frame: bytes) -> None:
    for decoder, _, _ in directions():
        with pytest.raises(ProtocolError, match=str(len(op_frame))) as caught:
            decoder.decode([op_frame, b"\x80"])
        assert caught.value.code == "protocol_error"


def test_every_op_byte_is_either_received_or_unknown() -> None:
    for (decoder, accepted, samples), op in itertools.product(directions(), range(256)):
        sample = next((m for m in samples if m.op == op), None)
        assert (sample is not None) == (op in {m.op for m in accepted})
        if sample is None:
            with pytest.raises(ProtocolError, match=f"0x{op:02x}") as caught:
                decoder.decode([bytes([op]), b"\x80"])
            assert caught.value.code == "unknown_op"
        else:
            assert decoder.decode([bytes([op]), encode(sample)[1]]) == sample


def test_finish_reasons_are_a_closed_set() -> None:
    assert set(get_args(FinishReason)) == {"stop", "length", "abort", "error", "timeout"}
    events = [{"handle": 1, "finish_reason": "tired"}]
    with pytest.raises(ProtocolError, match="finish_reason"):
        client_decoder().decode(frames(Output(), events=events))
