"""What the fake engine serves: a model of numbers, its files, and the state of its requests."""

from __future__ import annotations

import hashlib
from collections import deque
from dataclasses import dataclass, field

from nanocore.protocol.messages import Limits, ModelCard, ModelFile
from nanocore.protocol.sampling import EngineSamplingParams

VOCAB_SIZE, MAX_MODEL_LEN, BLOCK_SIZE = 50, 4096, 16
CHUNK_BYTES = 100
FILES = {"tokenizer.json": bytes(range(256)) + b"end", "chat_template.jinja": b""}
MAX_NUM_SEQS, MAX_QUEUED, NUM_BLOCKS = 8, 40, 300
PING_INTERVAL_MS = 20
INSTANCE = "0123456789abcdef" * 2


@dataclass
class Request:
    """One that has not ended."""

    request_id: str
    handle: int
    prompt: list[int]
    sampling: EngineSamplingParams
    seed: int
    num_tokens: int = 0


@dataclass
class Client:
    """One session."""

    routing_id: bytes
    session: str
    requests: dict[str, Request] = field(default_factory=dict)
    waiting: deque[list[bytes]] = field(default_factory=deque)


def model_card(digests: dict[str, str], vocab_size: int = VOCAB_SIZE) -> ModelCard:
    """The model card, with digests that may be wrong."""
    return ModelCard(
        model="fake",
        architecture="Fake",
        dtype="float32",
        vocab_size=vocab_size,
        max_model_len=MAX_MODEL_LEN,
        eos_token_ids=[],
        block_size=BLOCK_SIZE,
        num_blocks=NUM_BLOCKS,
        files=[
            ModelFile(name=name, num_bytes=len(content), sha256=digests[name])  # type: ignore[arg-type]
            for name, content in FILES.items()
        ],
    )


def right_digests() -> dict[str, str]:
    """sha256 of the files, by name."""
    return {name: hashlib.sha256(content).hexdigest() for name, content in FILES.items()}


LIMITS = Limits(
    max_frame_bytes=2**24,
    max_num_seqs=MAX_NUM_SEQS,
    ping_interval_ms=PING_INTERVAL_MS,
    session_timeout_ms=30_000,
    max_file_chunk_bytes=CHUNK_BYTES,
    max_num_queued_reqs=MAX_QUEUED,
)
