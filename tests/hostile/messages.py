"""Hostile messages by kind: bytes that are no message, messages that lie, and valid ones that hurt.

Every kind is a function of a random generator alone, so a seed names a whole attack. It returns a
few messages, each a list of frames, to be sent one after the other in an open session. None of them
pauses the engine: whoever may open the socket is allowed to.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Callable
from typing import Any, Final

import msgspec

from nanocore.protocol.messages import PROTOCOL_VERSION, Op

Frames = list[bytes]
Kind = Callable[[random.Random], list[Frames]]

BYSTANDER_IDS: Final = "bystander-{client}-{number}"
_PACK = msgspec.msgpack.Encoder().encode
_OPS: Final = [Op.HELLO, Op.SUBMIT, Op.ABORT, Op.PING, Op.PONG, Op.CONTROL, Op.BYE]
_CALM_OPERATIONS: Final = ["stats", "reset_prefix_cache", "resume", "read_file", "__class__", ""]


def frames(op: int, **body: Any) -> Frames:
    """A message as a client would send it."""
    return [bytes([op]), _PACK(body)]


def hello(version: tuple[int, int] = PROTOCOL_VERSION) -> Frames:
    """Opens a session."""
    return frames(Op.HELLO, protocol=list(version), client="hostile")


def submit(rng: random.Random, **changes: Any) -> dict[str, Any]:
    """The body of a valid, short, greedy request."""
    prompt = [rng.randrange(256) for _ in range(rng.randrange(1, 8))]
    sampling = {"temperature": 0.0, "max_tokens": rng.randrange(1, 4), "ignore_eos": True}
    return {
        "request_id": f"h{rng.getrandbits(64):x}",
        "prompt_token_ids": struct.pack(f"<{len(prompt)}i", *prompt),
        "sampling": sampling,
        **changes,
    }


def valid(rng: random.Random) -> tuple[int, dict[str, Any]]:
    """(op, body) of a valid message, for others to spoil. BYE is not among them."""
    op = rng.choice(_OPS[:-1])
    match op:
        case Op.HELLO:
            return op, {"protocol": list(PROTOCOL_VERSION), "client": "hostile"}
        case Op.SUBMIT:
            pooled = {"sampling": {"pooling": rng.choice(["last", "mean"])}}
            resumed = {"output_token_ids": struct.pack("<i", rng.randrange(256))}
            more = [pooled, resumed, {"timeout_s": rng.choice([1e-6, 0.01, 10])}, {}, {}]
            return op, submit(rng, **rng.choice(more))
        case Op.ABORT:
            return op, {"request_ids": [f"h{rng.getrandbits(64):x}"]}
        case Op.CONTROL:
            operation = rng.choice(_CALM_OPERATIONS)
            return op, {"call_id": rng.getrandbits(30), "operation": operation}
    return op, {"nonce": rng.getrandbits(30)}


def random_bytes(rng: random.Random) -> list[Frames]:
    """One to four frames of noise."""
    return [[rng.randbytes(rng.choice([0, 1, 2, 5, 60, 1000])) for _ in range(rng.randint(1, 4))]]


def mutated(rng: random.Random) -> list[Frames]:
    """A valid message with bytes flipped, cut, doubled or put in."""
    op, body = valid(rng)
    data = bytearray(_PACK(body))
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(data) + 1)
        match rng.randrange(5):
            case 0:
                data[at : at + 1] = bytes([rng.randrange(256)])
            case 1:
                data[at:] = b""
            case 2:
                data[at:at] = data[: rng.randrange(20)]
            case 3:
                data[at:at] = rng.randbytes(rng.randrange(1, 6))
            case 4:
                data[at : at + rng.randrange(1, 6)] = b""
    if op == Op.CONTROL and b"pause" in data:
        return []
    return [[bytes([op]), bytes(data)]]


def frame_counts(rng: random.Random) -> list[Frames]:
    """A valid message in too few or too many frames."""
    op, body = valid(rng)
    whole = [bytes([op]), _PACK(body)]
    count = rng.choice([1, 3, 3, 3, 4, 7, 8, 9, 50, 500])
    return [(whole * count)[:count]]


def op_bytes(rng: random.Random) -> list[Frames]:
    """Every op byte but BYE, over a body that may even fit it; and longer op frames."""
    _, body = valid(rng)
    op = rng.choice([op for op in range(256) if op != Op.BYE])
    return [[bytes([op]) * rng.choice([1, 1, 1, 2]), rng.choice([b"\x80", _PACK(body)])]]


def nesting(rng: random.Random) -> list[Frames]:
    """Arrays in arrays, maps in maps, where a field or the whole body should be."""
    bomb = rng.choice([b"\x91", b"\x81\xa1x", b"\x81", b"\xdd\0\0\0\1"])
    bomb *= rng.choice([10, 500, 2000, 20_000])
    heads = [b"", b"\x82\xa5nonce\x01\xa3new", b"\x81\xa8sampling", b"\x81\xabrequest_ids"]
    return [[bytes([rng.choice(_OPS)]), rng.choice(heads) + bomb]]


def lengths(rng: random.Random) -> list[Frames]:
    """Headers that claim up to 4 GiB."""
    head = rng.choice([b"\xdd", b"\xdf", b"\xdb", b"\xc6", b"\xc9"])
    size = rng.choice([2**32 - 1, 2**31, 2**24, 70_000]).to_bytes(4, "big")
    place = rng.choice([b"", b"\x81\xb0prompt_token_ids", b"\x81\xabrequest_ids", b"\x81\xa5nonce"])
    return [[bytes([rng.choice(_OPS)]), place + head + size + rng.randbytes(rng.randrange(30))]]


def bad_utf8(rng: random.Random) -> list[Frames]:
    """Strings that are none: keys, ids, operations."""
    text = rng.choice([b"\xff\xfe", b"\xed\xa0\x80", b"\xc0\x80", b"\xf4\x90\x80\x80", b"\xe2\x82"])
    string = bytes([0xA0 | len(text)]) + text
    op, body = rng.choice([
        (Op.SUBMIT, b"\x82\xaarequest_id" + string + b"\xb0prompt_token_ids\xc4\x00"),
        (Op.SUBMIT, b"\x81" + string + b"\x01"),
        (Op.ABORT, b"\x81\xabrequest_ids\x91" + string),
        (Op.CONTROL, b"\x82\xa7call_id\x01\xa9operation" + string),
        (Op.HELLO, b"\x81\xa6client" + string),
    ])  # fmt: skip
    return [[bytes([op]), body]]


def wrong_types(rng: random.Random) -> list[Frames]:
    """One field of a valid message takes another type, or a value out of any range."""
    op, body = valid(rng)
    owner = body["sampling"] if op == Op.SUBMIT and rng.random() < 0.5 else body
    key = rng.choice(
        [*owner, "seed", "priority", "top_p", "cache_salt", "output_token_ids", "timeout_s"]
    )
    owner[key] = rng.choice([
        None, True, 1.0, 1.5, float("nan"), float("inf"), -1, 2**31, 2**53, 2**63, 2**64 - 1,
        -(2**63), "1", "", b"", b"\1\0\0", [], [1], {}, {"x": 1}, "\0" * 50, "\u202e\U0001f4a9",
    ])  # fmt: skip
    return [[bytes([op]), _PACK(body)]]


def fields(rng: random.Random) -> list[Frames]:
    """Unknown, missing and repeated fields."""
    op, body = valid(rng)
    match rng.randrange(3):
        case 0:
            body[rng.choice(["x", "temprature", "__class__", "x" * 1000])] = 1
        case 1:
            body.pop(rng.choice(list(body)))
        case 2:
            pairs = list(body.items()) * rng.choice([2, 2, 5, 100])
            data = b"".join(_PACK(key) + _PACK(value) for key, value in pairs)
            return [[bytes([op]), b"\xdf" + len(pairs).to_bytes(4, "big") + data]]
    return [[bytes([op]), _PACK(body)]]


def foreign(rng: random.Random) -> list[Frames]:
    """Aborts of other clients' requests, by id and by handle, and requests with their ids."""
    ids = [
        BYSTANDER_IDS.format(client=client, number=number)
        for client in range(4)
        for number in range(rng.randrange(50), 200, 7)
    ]
    stolen = submit(rng, request_id=rng.choice(ids))
    return [
        frames(Op.ABORT, request_ids=ids),
        frames(Op.ABORT, request_ids=[str(handle) for handle in range(100)]),
        frames(Op.SUBMIT, **stolen),
        frames(Op.ABORT, request_ids=[*ids, stolen["request_id"]]),
    ]


def replays(rng: random.Random) -> list[Frames]:
    """A recorded session, played again: HELLO in the middle, messages after BYE."""
    body = submit(rng)
    session = [hello(), frames(Op.SUBMIT, **body), frames(Op.PONG, nonce=0)]
    bye = frames(Op.BYE, reason="x" * rng.choice([0, 1000]))
    return [*session, *session, bye, *session[1:], hello()]


def versions(rng: random.Random) -> list[Frames]:
    """A session's end, and HELLOs of versions that are not."""
    major = rng.choice([0, 2, 255, -1, 2**63, 2**64 - 1])
    minor = rng.choice([0, 99, 2**64 - 1, -5])
    return [frames(Op.BYE), hello((major, minor)), hello((1, minor)), frames(Op.BYE), hello()]


def storms(rng: random.Random) -> list[Frames]:
    """Valid requests, aborted at once or a little later."""
    bodies = [submit(rng) for _ in range(4)]
    for body in bodies:
        body["sampling"]["max_tokens"] = 100
    aborts = [frames(Op.ABORT, request_ids=[body["request_id"]]) for body in bodies]
    submits = [frames(Op.SUBMIT, **body) for body in bodies]
    if rng.random() < 0.5:
        return [*submits, *aborts]
    return [message for pair in zip(submits, aborts, strict=True) for message in pair]


def huge(rng: random.Random) -> list[Frames]:
    """Long prompts, ids, lists and names: up to 2 MiB, which is much for what they say."""
    size = rng.choice([10_000, 100_000, 2**19])
    count = size.to_bytes(4, "big")
    stop_ids = b"\x81\xa8sampling\x81\xaestop_token_ids\xdd"
    return [
        rng.choice([
            frames(Op.SUBMIT, **submit(rng, prompt_token_ids=b"\1\0\0\0" * size)),
            frames(Op.SUBMIT, **submit(rng, output_token_ids=b"\1\0\0\0" * size)),
            frames(Op.SUBMIT, **submit(rng, request_id="x" * size)),
            frames(Op.SUBMIT, **submit(rng, cache_salt="\0" * size)),
            [bytes([Op.SUBMIT]), stop_ids + count + b"\1" * size],
            [bytes([Op.SUBMIT]), b"\xdf" + count + b"\xa8sampling\x80" * size],
            frames(Op.SUBMIT, **{"x" * size: 1}),
            [bytes([Op.ABORT]), b"\x81\xabrequest_ids\xdd" + count + b"\xa1a" * size],
            frames(Op.CONTROL, call_id=1, operation="\0" * size),
            frames(Op.CONTROL, call_id=1, operation="read_file", file="../" * size),
            [rng.randbytes(size), b""],
            [b"x"] * (size // 1000),
        ])
    ]  # fmt: skip


def controls(rng: random.Random) -> list[Frames]:
    """Floods of calls; files that are not served, and odd places of one that is."""
    name = rng.choice(
        ["tokenizer.json", "config.json", "../tokenizer.json", "/etc/passwd", "", None]
    )
    offset = rng.choice([0, 1, 2**40, 2**53 - 1])
    read = frames(Op.CONTROL, call_id=1, operation="read_file", file=name, offset=offset)
    return [read, *[frames(Op.CONTROL, call_id=i, operation="stats") for i in range(8)]]


KINDS: Final[dict[str, tuple[Kind, float]]] = {
    "random bytes": (random_bytes, 20),
    "mutated": (mutated, 40),
    "frame counts": (frame_counts, 10),
    "op bytes": (op_bytes, 15),
    "nesting": (nesting, 4),
    "lengths": (lengths, 10),
    "bad utf-8": (bad_utf8, 10),
    "wrong types": (wrong_types, 30),
    "fields": (fields, 15),
    "foreign ids": (foreign, 3),
    "replays": (replays, 2),
    "versions": (versions, 2),
    "submit and abort": (storms, 1),
    "huge": (huge, 0.02),
    "controls": (controls, 1),
}
"""What to send, and how often, relative to the others."""


def draw(rng: random.Random) -> tuple[str, list[Frames]]:
    """(kind, messages) of the next attack."""
    (name,) = rng.choices(list(KINDS), [weight for _, weight in KINDS.values()])
    return name, KINDS[name][0](rng)
