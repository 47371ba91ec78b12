"""The wire format of KV cache events: what any msgpack library reads, field by field."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from nanocore.protocol.errors import ProtocolError
from nanocore.protocol.kv_events import (
    END_SEQ,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVEventBatch,
    decode_batch,
    encode_batch,
    event_frames,
    replay_end_frames,
    replay_frames,
    replay_start,
)

A, B = 0, 2**64 - 1
STORED = BlockStored([A, B], None, [1, 2, 3, 4], 2, None, "GPU", None, [["5a17"], None])
BATCH = KVEventBatch(12.5, [STORED, BlockRemoved([A], "CPU"), AllBlocksCleared()], None)
WRITTEN: list[Any] = [
    12.5,
    [
        {
            "type": "BlockStored",
            "block_hashes": [A, B],
            "parent_block_hash": None,
            "token_ids": [1, 2, 3, 4],
            "block_size": 2,
            "lora_id": None,
            "medium": "GPU",
            "lora_name": None,
            "extra_keys": [["5a17"], None],
            "group_idx": None,
        },
        {"type": "BlockRemoved", "block_hashes": [A], "medium": "CPU", "group_idx": None},
        {"type": "AllBlocksCleared"},
    ],
    None,
]


class RouterEvent(msgspec.Struct, tag=True):
    """An event as a router declares it, with the fields of its time."""


class RouterStored(RouterEvent, tag="BlockStored"):
    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None  # younger than what we send


class RouterRemoved(RouterEvent, tag="BlockRemoved"):
    block_hashes: list[int]  # older than what we send: no medium


class RouterCleared(RouterEvent, tag="AllBlocksCleared"):
    pass


class RouterBatch(msgspec.Struct, array_like=True):
    ts: float
    events: list[RouterStored | RouterRemoved | RouterCleared]
    data_parallel_rank: int | None = None


def test_a_batch_is_an_array_around_the_documented_maps() -> None:
    assert msgspec.msgpack.decode(encode_batch(BATCH)) == WRITTEN


def test_an_array_around_maps_is_a_batch() -> None:
    assert decode_batch(msgspec.msgpack.encode(WRITTEN)) == BATCH


def test_what_later_engines_add_is_ignored() -> None:
    ts, (stored, *others), rank = WRITTEN
    later = [ts, [stored | {"later": 1}, *others], rank]
    assert decode_batch(msgspec.msgpack.encode(later)) == BATCH


def test_nil_fields_are_present() -> None:
    bare = KVEventBatch(0.0, [BlockStored([A], None, [1, 2], 2, None, "GPU", None, None)], None)
    _ts, (stored,), _rank = msgspec.msgpack.decode(encode_batch(bare))
    assert stored.keys() == WRITTEN[1][0].keys()


def test_a_router_with_older_or_younger_structs_reads_them() -> None:
    stored, removed, cleared = msgspec.msgpack.decode(encode_batch(BATCH), type=RouterBatch).events
    assert stored == RouterStored(
        [A, B], None, [1, 2, 3, 4], 2, None, "GPU", None, [("5a17",), None]
    )
    assert removed == RouterRemoved([A])
    assert cleared == RouterCleared()


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        b"\x90",
        b"\x91" * 10_000,
        msgspec.msgpack.encode([0.0, [{"type": "Other"}], None]),
    ],
)
def test_bytes_that_are_no_batch_are_a_protocol_error(payload: bytes) -> None:
    with pytest.raises(ProtocolError, match="KV events"):
        decode_batch(payload)


def test_sequence_numbers_are_eight_bytes_big_endian() -> None:
    assert event_frames(b"topic", 258, b"x") == [b"topic", b"\0\0\0\0\0\0\1\2", b"x"]
    assert replay_frames(b"t", 258, b"x") == [b"", b"t", b"\0\0\0\0\0\0\1\2", b"x"]
    assert replay_start([b"", b"\0\0\0\0\0\0\1\2"]) == 258


def test_a_replay_ends_with_minus_one_and_nothing() -> None:
    assert replay_end_frames() == [b"", b"", END_SEQ, b""]
    assert int.from_bytes(END_SEQ, "big", signed=True) == -1


@pytest.mark.parametrize(
    "frames",
    [
        [],
        [bytes(8)],
        [b"", b""],
        [b"", bytes(7)],
        [b"", bytes(9)],
        [b"x", bytes(8)],
        [b"", bytes(8), b""],
    ],
)
def test_other_frames_are_no_replay_request(frames: list[bytes]) -> None:
    with pytest.raises(ProtocolError, match="8 bytes"):
        replay_start(frames)
