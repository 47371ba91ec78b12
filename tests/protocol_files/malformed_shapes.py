"""What is no message whatever its fields are: frames, ops, bodies that are no map, cut, bombs.

Nested and long bodies are also cut short, so that a receiver refuses them however deep it can
follow. An engine may disconnect a client that sends many frames at once, so it gets fewer here.
"""

from __future__ import annotations

from collections.abc import Iterator

from tests.protocol_files.bodies import FULL_CLIENT, FULL_ENGINE
from tests.protocol_files.lines import (
    BYE,
    CLIENT_OPS,
    CONTROL,
    ENGINE_OPS,
    ERROR,
    HELLO,
    NAMES,
    OUTPUT,
    PING,
    PONG,
    REPLY,
    SUBMIT,
    WELCOME,
    Line,
    Sender,
    column,
    malformed,
    malformed_frames,
    pack,
)

DEPTH = 5_000
NO_MAP = {"nil": b"\xc0", "array": b"\x90", "int": b"\x01", "str": b"\xa1x", "bin": b"\xc4\x00",
          "bool": b"\xc3", "float": b"\xcb" + bytes(8), "array-of-map": b"\x91\x80",
          "json": b'{"protocol": [1, 5], "request_id": "a"}'}  # fmt: skip
NO_MSGPACK = {"ext": b"\xd4\x01\x00", "timestamp": b"\xd6\xff" + bytes(4), "never-used": b"\xc1"}
BOMBS = {"array32": b"\xdd", "map32": b"\xdf", "str32": b"\xdb", "bin32": b"\xc6"}
BAD_UTF8 = {"lone-byte": b"\xa2\xff\xfe", "overlong": b"\xa2\xc0\x80",
            "surrogate": b"\xa3\xed\xa0\x80", "cut": b"\xa2\xe2\x82"}  # fmt: skip
GOOD: dict[Sender, dict[int, dict[str, object]]] = {"client": FULL_CLIENT, "engine": FULL_ENGINE}
OPS: dict[Sender, tuple[int, ...]] = {"client": CLIENT_OPS, "engine": ENGINE_OPS}


def frame_shapes(sender: Sender) -> Iterator[Line]:
    ping = b"\x81\xa5nonce\x07"
    for name, frames in {
        "one-frame": [b"\x20"],
        "one-empty-frame": [b""],
        "one-frame-of-both": [b"\x20" + ping],
        "three-frames": [b"\x20", ping, b""],
        "delimiter-frame": [b"", b"\x20", ping],
        "many-frames": [b"\x20", *[ping] * (49 if sender == "engine" else 6)],
        "op-of-no-byte": [b"", ping],
        "op-of-two-bytes": [b"\x20\x20", ping],
        "http": [b"GET / HTTP/1.1", b""],
    }.items():
        yield malformed_frames(sender, name, frames)


def unknown_ops(sender: Sender) -> Iterator[Line]:
    """Ops of nobody, and those that only the other side sends."""
    code = "unknown_op" if sender == "client" else "protocol_error"
    for op in (0x00, 0x04, 0x15, 0x22, 0x42, 0x43, 0x7F, 0x80, 0xFF):
        yield malformed_frames(sender, f"unknown-op-{op:02x}", [bytes([op]), b"\x80"], code)
    other: Sender = "engine" if sender == "client" else "client"
    for op in OPS[other]:
        if op not in OPS[sender]:
            frames = [bytes([op]), pack(GOOD[other][op])]
            yield malformed_frames(sender, f"{NAMES[op]}-is-of-the-other-side", frames, code)


def bodies(sender: Sender) -> Iterator[Line]:
    """For every op: no map, nothing, cut short, followed by more, longer than anything."""
    lenient = _lenient(sender)
    for op in OPS[sender]:
        for name, body in NO_MAP.items():
            yield malformed(sender, op, f"body-is-{name}", body)
        for name, body in NO_MSGPACK.items():
            yield malformed(sender, op, f"body-is-{name}", body)
        good = pack(GOOD[sender][op])
        yield malformed(sender, op, "body-empty", b"")
        yield malformed(sender, op, "body-cut-after-its-head", good[:1])
        yield malformed(sender, op, "body-cut-in-the-middle", good[: len(good) // 2])
        yield malformed(sender, op, "body-cut-at-the-end", good[:-1])
        yield malformed(sender, op, "body-and-a-zero", good + b"\x00", **lenient)
        yield malformed(sender, op, "body-twice", good + good, **lenient)
        for name, head in BOMBS.items():
            yield malformed(sender, op, f"bomb-{name}", head + b"\xff\xff\xff\xff")


def nesting(sender: Sender) -> Iterator[Line]:
    for name, opening in {"arrays": b"\x91", "maps": b"\x81\xa1x"}.items():
        deep = b"\x82\xa5nonce\x01\xa3new" + opening * DEPTH
        yield malformed(sender, PONG, f"deep-{name}-in-an-unknown-field", deep)
    yield malformed(sender, PING, "deep-arrays", b"\x91" * DEPTH)
    yield malformed(sender, BYE, "deep-maps", b"\x81\xa6reason" * (DEPTH // 7))


def bombs_in_fields(sender: Sender) -> Iterator[Line]:
    huge = b"\xff\xff\xff\xff"
    for name, head in BOMBS.items():
        yield malformed(sender, PING, f"nonce-is-bomb-{name}", b"\x81\xa5nonce" + head + huge)
        new = b"\x82\xa5nonce\x01\xa3new" + head + huge
        yield malformed(sender, PING, f"bomb-{name}-in-an-unknown-field", new)
    yield malformed(sender, BYE, "reason-is-bomb", b"\x81\xa6reason\xdb" + huge)
    if sender == "client":
        start = b"\x83\xaarequest_id\xa1a\xb0prompt_token_ids"
        for name, body in {
            "request-id": b"\x81\xaarequest_id\xdb" + huge,
            "prompt": start + b"\xc6" + huge,
            "prompt-of-16-mib": start + b"\xc6\x01\x00\x00\x00" + column(1),
            "stop-token-ids": start + b"\xc4\x04" + column(1)
            + b"\xa8sampling\x81\xaestop_token_ids\xdd" + huge,
        }.items():  # fmt: skip
            yield malformed(sender, SUBMIT, f"{name}-is-bomb", body)
        wrong = b"\x82\xaarequest_id\x05\xa8priority"
        for name, tail in {"and-is-cut": b"\xa1", "and-a-zero": b"\1\0"}.items():
            yield malformed(sender, SUBMIT, f"wrong-type-{name}", wrong + tail)
    else:
        for op, name, body in (
            (OUTPUT, "handles", b"\x81\xa7handles\xc6" + huge),
            (OUTPUT, "events", b"\x81\xa6events\xdd" + huge),
            (REPLY, "data", b"\x82\xa7call_id\x01\xa4data\xc6" + huge),
            (WELCOME, "protocol", b"\x81\xa8protocol\xdd" + huge),
            (ERROR, "message", b"\x81\xa7message\xdb" + huge),
        ):
            yield malformed(sender, op, f"{name}-is-bomb", body)


def bad_utf8(sender: Sender) -> Iterator[Line]:
    for name, text in BAD_UTF8.items():
        body = b"\x81\xa6reason" + text
        yield malformed(sender, BYE, f"bad-utf8-{name}", body, **_lenient(sender))
    if sender == "client":
        text = BAD_UTF8["lone-byte"]
        for op, body in {
            HELLO: b"\x82\xa8protocol\x92\x01\x00\xa6client" + text,
            SUBMIT: b"\x82\xaarequest_id" + text + b"\xb0prompt_token_ids\xc4\x04" + column(1),
            CONTROL: b"\x82\xa7call_id\x01\xa9operation" + text,
        }.items():
            yield malformed(sender, op, "bad-utf8", body)
    else:
        body = b"\x82\xa4code\xaainvalid_re" + b"\xa7message" + BAD_UTF8["cut"]
        yield malformed(sender, ERROR, "bad-utf8", body, **_lenient(sender))


def _lenient(sender: Sender) -> dict[str, bool]:
    """Marks what a client may take, because its msgpack library does."""
    return {"strict": True} if sender == "engine" else {}


def shape_lines(sender: Sender) -> Iterator[Line]:
    """All of one direction."""
    yield from frame_shapes(sender)
    yield from unknown_ops(sender)
    yield from bodies(sender)
    yield from nesting(sender)
    yield from bombs_in_fields(sender)
    yield from bad_utf8(sender)
