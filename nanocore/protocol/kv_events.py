"""KV cache events on the wire, in the format that prefix-aware routers know from vLLM.

An event is a map with its name under `type`; only the batch around the events is an array. Unlike
in the messages between client and engine no field is left out, because routers may require any of
vLLM's. Block hashes are unsigned 64-bit integers, vLLM's default, because some routers take nothing
else; they are routing hints and may clash. An engine publishes one batch per step as three frames,
topic, sequence number and payload; the replay endpoint answers with the same three, behind the
empty frame of the request. docs/kv-events.md is the specification.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal

import msgspec

from nanocore.protocol.errors import ProtocolError

SEQUENCE_BYTES: Final = 8
END_SEQ: Final = b"\xff" * SEQUENCE_BYTES
"""End of a replay, in place of a sequence number. Its payload is empty."""

Medium = Literal["GPU", "CPU"]


class BlockStored(msgspec.Struct, tag=True, frozen=True, gc=False):
    """Consecutive full blocks of one prefix can be found from now on.

    lora_id, lora_name: always nil, for there are no adapters. extra_keys: nil if nothing but tokens
    goes into the hashes; else one entry per block, of which the first holds a digest of the rest.
    group_idx: group of the model's layers; nil if there is only one.
    """

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: Medium
    lora_name: str | None
    extra_keys: list[list[str] | None] | None
    group_idx: int | None = None


class BlockRemoved(msgspec.Struct, tag=True, frozen=True, gc=False):
    """No copy of these blocks can be found any more. group_idx: as in `BlockStored`."""

    block_hashes: list[int]
    medium: Medium
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, tag=True, frozen=True, gc=False):
    """No block can be found any more."""


class KVEventBatch(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """The events of one step, in order. ts: wall clock, seconds since 1970."""

    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(KVEventBatch)


def encode_batch(batch: KVEventBatch) -> bytes:
    return _ENCODER.encode(batch)


def decode_batch(payload: bytes) -> KVEventBatch:
    """Decode a payload frame.

    Raises:
        ProtocolError: it is no batch of events.
    """
    try:
        return _DECODER.decode(payload)
    except Exception as error:  # bad UTF-8 and deep nesting are outside msgspec's own hierarchy
        raise ProtocolError(f"KV events: {type(error).__name__}: {error}") from None


def event_frames(topic: bytes, sequence: int, payload: bytes) -> list[bytes]:
    """Frames for a subscriber."""
    return [topic, pack_sequence(sequence), payload]


def replay_frames(topic: bytes, sequence: int, payload: bytes) -> list[bytes]:
    """Frames for a replay client: a subscriber's, behind an empty frame."""
    return [b"", *event_frames(topic, sequence, payload)]


def replay_end_frames() -> list[bytes]:
    return [b"", b"", END_SEQ, b""]


def pack_sequence(sequence: int) -> bytes:
    return sequence.to_bytes(SEQUENCE_BYTES, "big")


def replay_start(frames: Sequence[bytes]) -> int:
    """Return the sequence number from which a replay request wants batches.

    Raises:
        ProtocolError: the frames are no request.
    """
    if len(frames) != 2 or frames[0] or len(frames[1]) != SEQUENCE_BYTES:
        raise ProtocolError(
            f"a replay request is an empty frame and a sequence number of {SEQUENCE_BYTES} bytes; "
            f"got {len(frames)} frames of {[len(frame) for frame in frames[:4]]} bytes"
        )
    return int.from_bytes(frames[1], "big")
