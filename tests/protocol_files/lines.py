"""One test vector as one line of vectors.jsonl, and the bytes behind it.

Built from plain maps with a general msgpack encoder and never with `nanocore.protocol`: the file is
to judge that code, too. `Sender` says whose op it is; what the receiver must do follows from which
of `valid`, `malformed` and `ignored` made the line.
"""

from __future__ import annotations

import copy
import math
import struct
from typing import Any, Literal

import msgspec

Sender = Literal["client", "engine"]
Body = dict[str, Any]
Line = dict[str, Any]

HELLO, WELCOME, REFUSED = 0x01, 0x02, 0x03
SUBMIT, ACCEPTED, OUTPUT, ERROR, ABORT = 0x10, 0x11, 0x12, 0x13, 0x14
PING, PONG, CONTROL, REPLY, DRAINING, BYE = 0x20, 0x21, 0x30, 0x31, 0x40, 0x41
NAMES = {
    HELLO: "hello", WELCOME: "welcome", REFUSED: "refused", SUBMIT: "submit",
    ACCEPTED: "accepted", OUTPUT: "output", ERROR: "error", ABORT: "abort", PING: "ping",
    PONG: "pong", CONTROL: "control", REPLY: "reply", DRAINING: "draining", BYE: "bye",
}  # fmt: skip
CLIENT_OPS = (HELLO, SUBMIT, ABORT, PING, PONG, CONTROL, BYE)
ENGINE_OPS = (WELCOME, REFUSED, ACCEPTED, OUTPUT, ERROR, PING, PONG, REPLY, DRAINING, BYE)

NEW_IN_1_5 = {
    "n", "min_tokens", "presence_penalty", "frequency_penalty", "repetition_penalty",
    "allowed_token_ids", "logprobs", "prompt_logprobs", "logit_bias", "bad_words_token_ids",
    "handles",
}  # fmt: skip
"""Fields that clients send only to engines which know them."""
NEW_IN_1_9 = {"output_token_ids", "timeout_s", "session_timeout_ms"}
"""Likewise; an older engine would ignore the last one, in PING, whatever it is."""
NEW_IN_1_11 = {"after"}

pack = msgspec.msgpack.encode


def column(*values: int, signed: bool = True) -> bytes:
    """int32, or else uint32, little endian."""
    return b"".join(value.to_bytes(4, "little", signed=signed) for value in values)


def handles(*values: int) -> bytes:
    """A uint32 column: of handles, or of counts."""
    return column(*values, signed=False)


def floats(*values: float) -> bytes:
    """A float32 column."""
    return struct.pack(f"<{len(values)}f", *values)


def changed(body: Body, path: str, value: object) -> Body:
    """A copy in which the field at this dotted path, through maps and first items, is another."""
    result = copy.deepcopy(body)
    *parents, name = path.split(".")
    inner: Any = result
    for parent in parents:
        inner = inner[parent]
        inner = inner[0] if isinstance(inner, list) else inner
    inner[name] = value
    return result


def without(body: Body, path: str) -> Body:
    """A copy in which the field at this dotted path is absent."""
    result = changed(body, path, None)
    *parents, name = path.split(".")
    inner: Any = result
    for parent in parents:
        inner = inner[parent]
        inner = inner[0] if isinstance(inner, list) else inner
    del inner[name]
    return result


def valid(
    sender: Sender, op: int, name: str, body: Body, *, raw: bytes | None = None, **more: Any
) -> Line:
    """A message. body: what is read; raw: the body's bytes, if they are not simply `body`'s."""
    line = _line(sender, op, name, pack(body) if raw is None else raw)
    line["message"] = _readable(body)
    sampling = body.get("sampling") or {}
    if sender == "client" and NEW_IN_1_11 & body.keys():
        line["presumes"] = "protocol 1.11"
    elif sender == "client" and NEW_IN_1_9 & body.keys():
        line["presumes"] = "protocol 1.9"
    elif sender == "client" and "repetition_detection" in sampling:
        line["presumes"] = "protocol 1.14"
    elif sender == "client" and "pooling" in sampling:
        line["presumes"] = "protocol 1.7" if sampling["pooling"] is None else "embeddings"
    elif sender == "client" and "structured_outputs" in sampling:
        wanted = sampling["structured_outputs"]
        line["presumes"] = "protocol 1.6" if wanted is None else "structured outputs"
        if wanted is not None and "reasoning" in wanted:
            line["presumes"] = "reasoning"
        if wanted is not None and "free_prefixes" in wanted:
            line["presumes"] = "free prefixes"
        if wanted is not None and "lenient" in wanted:
            line["presumes"] = "lenient parts"
    elif sender == "client" and NEW_IN_1_5 & (body.keys() | sampling.keys()):
        line["presumes"] = "protocol 1.5"
    if raw is None and _has_one_form(body):
        line["canonical"] = True
    return line | more


def malformed(
    sender: Sender, op: int, name: str, body: Body | bytes, code: str = "", **more: Any
) -> Line:
    """What is refused. code: the error's; by default that of a message that is none."""
    data = body if isinstance(body, bytes) else pack(body)
    line = _line(sender, op, name, data) | {"error": code or "protocol_error"}
    if (sender, op) == ("client", PING) and "session_timeout_ms" in data.decode("latin-1"):
        line["presumes"] = "protocol 1.9"
    return line | more


def malformed_frames(sender: Sender, name: str, frames: list[bytes], code: str = "") -> Line:
    """As `malformed`, of frames that need not be two."""
    return {
        "name": f"{sender}-{name}",
        "sender": sender,
        "frames": [frame.hex() for frame in frames],
        "error": code or "protocol_error",
    }


def ignored(op: int, name: str, body: Body | bytes, **more: Any) -> Line:
    """What a client may send without being answered."""
    data = body if isinstance(body, bytes) else pack(body)
    return _line("client", op, name, data) | {"ignored": True} | more


def _line(sender: Sender, op: int, name: str, data: bytes) -> Line:
    frames = [bytes([op]).hex(), data.hex()]
    return {"name": f"{sender}-{NAMES[op]}-{name}", "sender": sender, "frames": frames}


def _readable(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, dict):
        return {key: _readable(inner) for key, inner in value.items()}
    return [_readable(inner) for inner in value] if isinstance(value, list) else value


def _has_one_form(value: Any) -> bool:
    """Whether every encoder writes it alike: no nil that could be absent, no float like 1.0."""
    if isinstance(value, dict):
        return all(map(_has_one_form, value.values()))
    if isinstance(value, list):
        return all(map(_has_one_form, value))
    return not (value is None or (isinstance(value, float) and math.floor(value) == value))
