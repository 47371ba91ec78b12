"""The test vectors: messages as frames, and what their receiver must do.

vectors.jsonl has one JSON object per line, with a unique `name`, the `sender` ("client" or
"engine") and `frames` (hex). Beside these, either `message`: the frames are valid, and this is the
body, `bin` fields as hex, without what its receiver need not know; `canonical` if an encoder that
writes these fields in this order, in the shortest forms, makes exactly these frames. Or `error`:
the code that an engine answers, with `request_id` if that could be read; an engine's malformed
message ends the session instead, though a client may take one that is marked `strict`. Or
`ignored`: it is answered by nothing.
Those of clients are sent in an open session, unless `before_hello` is true. They presume no model
but token ids below 4, 24 tokens of length, and what `presumes` names.
"""

from __future__ import annotations

import json
from importlib import resources
from typing import Any, Literal

import msgspec

Sender = Literal["client", "engine"]


class Vector(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One line of vectors.jsonl. presumes: "priority scheduling" or "fcfs scheduling"."""

    name: str
    sender: Sender
    frames: list[str]
    message: dict[str, Any] | None = None
    canonical: bool = False
    error: str | None = None
    request_id: str | None = None
    strict: bool = False
    ignored: bool = False
    before_hello: bool = False
    presumes: str | None = None

    @property
    def data(self) -> list[bytes]:
        """The frames as bytes."""
        return [bytes.fromhex(frame) for frame in self.frames]


def load_vectors(sender: Sender) -> list[Vector]:
    """All vectors of one side's messages."""
    text = resources.files(__package__).joinpath("vectors.jsonl").read_text("utf-8")
    vectors = [msgspec.convert(json.loads(line), Vector) for line in text.splitlines()]
    return [vector for vector in vectors if vector.sender == sender]
