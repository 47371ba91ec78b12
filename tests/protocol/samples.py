"""One full and one minimal message of every type, for tests that go over all of them."""

from __future__ import annotations

from typing import Any

import msgspec

from nanocore.protocol.codec import MessageDecoder, client_decoder, engine_decoder, pack_int32
from nanocore.protocol.messages import (
    FROM_CLIENT,
    FROM_ENGINE,
    Abort,
    Accepted,
    Bye,
    Control,
    Draining,
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
from nanocore.protocol.metrics import Stats
from nanocore.protocol.sampling import EngineSamplingParams

MODEL_CARD = ModelCard(
    model="/models/tiny",
    architecture="Qwen3ForCausalLM",
    dtype="float32",
    vocab_size=384,
    max_model_len=1024,
    eos_token_ids=[383],
    block_size=16,
    num_blocks=64,
)
LIMITS = Limits(
    max_frame_bytes=2**24, max_num_seqs=8, ping_interval_ms=1000, session_timeout_ms=10_000
)
WELCOME = Welcome(
    protocol=(1, 0), session="s", engine_instance="e", model=MODEL_CARD, limits=LIMITS
)
STATS = Stats(
    num_requests_running=1,
    num_requests_waiting=2,
    kv_cache_usage_perc=0.5,
    num_blocks=64,
    num_free_blocks=32,
    prefix_cache_queries=3,
    prefix_cache_hits=4,
    num_preemptions=5,
    num_aborts=6,
    prompt_tokens=7,
    generation_tokens=8,
    num_steps=9,
    paused=False,
)
SUBMIT = Submit(
    request_id="r1",
    prompt_token_ids=pack_int32([1, 2, 3]),
    sampling=EngineSamplingParams(
        temperature=0.7,
        top_p=0.9,
        top_k=40,
        min_p=0.05,
        seed=7,
        max_tokens=16,
        stop_token_ids=[5, 6],
        ignore_eos=True,
    ),
    priority=-3,
    cache_salt="pepper",
)

CLIENT_MESSAGES: list[Message] = [
    Hello(protocol=(1, 0), client="test/1"),
    Hello(protocol=(1, 0)),
    SUBMIT,
    Submit(request_id="r2", prompt_token_ids=b""),
    Submit(
        request_id="r3",
        prompt_token_ids=pack_int32([1]),
        output_token_ids=pack_int32([2]),
        timeout_s=0.5,
    ),
    Abort(request_ids=["r1", "ü"]),
    Ping(nonce=7),
    Ping(session_timeout_ms=1000),
    Ping(),
    Pong(nonce=7),
    Control(call_id=1, operation="stats"),
    Control(call_id=2, operation="reset_prefix_cache"),
    Bye(reason="done"),
    Bye(),
]
ENGINE_MESSAGES: list[Message] = [
    WELCOME,
    Refused(message="too old", supported=[(1, 0), (2, 3)]),
    Accepted(request_id="r1", handle=2**32 - 1, seed=2**53 - 1),
    Output(),
    Output(
        handles=b"\1\0\0\0",
        tokens=b"\5\0\0\0\6\0\0\0",
        counts=b"\2\0\0\0",
        events=[
            Event(handle=1, num_cached_tokens=16),
            Event(handle=2, finish_reason="stop", stop_reason=383),
            Event(handle=3, finish_reason="error", message="boom"),
        ],
    ),
    Error(code="overloaded", message="full", request_id="r1", retry_after_s=2.5),
    Error(code="protocol_error", message="what?"),
    Ping(nonce=2**53 - 1),
    Pong(nonce=1, num_steps=123),
    Reply(call_id=1, stats=STATS),
    Reply(call_id=2, ok=False, message="busy"),
    Draining(),
    Draining(deadline_ms=0),
    Bye(reason="SIGTERM"),
]


def directions() -> list[tuple[MessageDecoder, tuple[type[Message], ...], list[Message]]]:
    """(decoder, what it accepts, samples) of either direction."""
    return [
        (engine_decoder(), FROM_CLIENT, CLIENT_MESSAGES),
        (client_decoder(), FROM_ENGINE, ENGINE_MESSAGES),
    ]


def body_of(message: Message) -> dict[str, Any]:
    """The message's body, as the plain map that a client in another language would write."""
    body: dict[str, Any] = msgspec.to_builtins(message, builtin_types=(bytes,))
    return body


def frames(message: Message, **changes: object) -> list[bytes]:
    """Frames of a message whose body has these fields added or replaced."""
    return [bytes([message.op]), msgspec.msgpack.encode(body_of(message) | changes)]
