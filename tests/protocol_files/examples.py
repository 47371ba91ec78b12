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
    Control,
    Draining,
    Error,
    Event,
    Hello,
    Message,
    Output,
    Ping,
    Pong,
    Reply,
    Submit,
    TokenLogprobs,
)
from nanocore.protocol.sampling import EngineSamplingParams
from tests.protocol_files.hex_dump import hex_dump

MARK = re.compile(r"<!-- example: ([^\n]*) -->\n(?:\n?```\n.*?\n```\n)?", re.DOTALL)


def _column(*values: int) -> bytes:
    return struct.pack(f"<{len(values)}i", *values)


EXAMPLES: dict[str, Message] = {
    "framing": Ping(nonce=5),
    "HELLO": Hello(protocol=PROTOCOL_VERSION, client="demo/1.0"),
    "SUBMIT": Submit(
        request_id="a",
        prompt_token_ids=_column(1, 2, 3),
        sampling=EngineSamplingParams(temperature=0.5, max_tokens=8),
    ),
    "SUBMIT resumed": Submit(
        request_id="a",
        prompt_token_ids=_column(1, 2, 3),
        sampling=EngineSamplingParams(temperature=0.5, seed=42, max_tokens=8),
        output_token_ids=_column(1511, 24),
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
    "OUTPUT logprobs": Output(
        handles=_column(7, 8),
        tokens=_column(1511, 24),
        logprobs=TokenLogprobs(
            handles=_column(7),
            ranks=_column(2),
            counts=_column(3),
            token_ids=_column(1511, 24, 1511),
            logprobs=struct.pack("<3f", -1.5, -0.5, -1.5),
        ),
    ),
    "ABORT": Abort(request_ids=[], handles=_column(8)),
    "ERROR": Error(code="duplicate_request_id", message="request_id 'a' is in use", request_id="a"),
    "PONG": Pong(nonce=5, num_steps=1234, step_age_ms=12),
    "CONTROL": Control(call_id=1, operation="read_file", file="tokenizer.json", offset=65536),
    "DRAINING": Draining(deadline_ms=30_000),
    "REPLY": Reply(call_id=1, data=b'{"version"'),
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
