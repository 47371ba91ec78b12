"""The messages of PROTOCOL.md's examples, by name, and how they get into the document.

They are one conversation: a client opens a session, submits request "a", is told what it came to.
"""

from __future__ import annotations

import re
import struct

from nanocore.protocol.messages import (
    PROTOCOL_VERSION,
    Abort,
    Accepted,
    Bye,
    Control,
    Error,
    Event,
    Hello,
    Limits,
    Message,
    ModelCard,
    Output,
    Ping,
    Pong,
    Refused,
    Reply,
    Submit,
    Welcome,
)
from nanocore.protocol.sampling import EngineSamplingParams
from tools.protocol.hex_dump import hex_dump

MARK = re.compile(r"<!-- example: ([^\n]*) -->\n(?:\n?```\n.*?\n```\n)?", re.DOTALL)

_CARD = ModelCard(
    model="/m",
    architecture="Qwen3ForCausalLM",
    dtype="bfloat16",
    vocab_size=2048,
    max_model_len=4096,
    eos_token_ids=[1, 3],
    block_size=16,
    num_blocks=1000,
)
_LIMITS = Limits(
    max_frame_bytes=2**24,
    max_num_seqs=256,
    ping_interval_ms=1000,
    session_timeout_ms=30_000,
    max_num_queued_reqs=4096,
    max_num_queued_tokens=2**22,
)


def _column(*values: int) -> bytes:
    return struct.pack(f"<{len(values)}i", *values)


EXAMPLES: dict[str, Message] = {
    "framing": Ping(nonce=5),
    "HELLO": Hello(protocol=PROTOCOL_VERSION, client="demo/1.0"),
    "WELCOME": Welcome(
        protocol=PROTOCOL_VERSION,
        session="5c0e8c2f90d9aa41",
        engine_instance="00112233445566778899aabbccddeeff",
        model=_CARD,
        limits=_LIMITS,
        capabilities=["prefix_caching"],
    ),
    "REFUSED": Refused(message="this engine speaks protocol 1.x", supported=[PROTOCOL_VERSION]),
    "SUBMIT": Submit(
        request_id="a",
        prompt_token_ids=_column(1, 2, 3),
        sampling=EngineSamplingParams(temperature=0.5, max_tokens=8),
    ),
    "ACCEPTED": Accepted(request_id="a", handle=7, seed=42),
    "OUTPUT": Output(
        handles=_column(7, 9),
        tokens=_column(1511, 24),
        events=[Event(handle=7, num_cached_tokens=0)],
    ),
    "OUTPUT merged": Output(
        handles=_column(7, 9),
        tokens=_column(310, 7, 5),
        counts=_column(2, 1),
        events=[Event(handle=9, finish_reason="stop", stop_reason=5)],
    ),
    "ERROR": Error(code="duplicate_request_id", message="request_id 'a' is in use", request_id="a"),
    "ABORT": Abort(request_ids=["a"]),
    "PING": Ping(nonce=5),
    "PONG": Pong(nonce=5, num_steps=1234, step_age_ms=12),
    "CONTROL": Control(call_id=1, operation="read_file", file="tokenizer.json", offset=65536),
    "REPLY": Reply(call_id=1, data=b'{"version"'),
    "BYE": Bye(reason="SIGTERM"),
}


def with_examples(document: str) -> str:
    """The document with each marked example written anew.

    Raises:
        KeyError: a mark names no example.
    """
    return MARK.sub(
        lambda mark: f"{mark[0].splitlines()[0]}\n```\n{hex_dump(EXAMPLES[mark[1]])}\n```\n",
        document,
    )
