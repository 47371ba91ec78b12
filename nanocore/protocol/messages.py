"""The messages between a client and the engine. PROTOCOL.md is their specification.

A message is two ZeroMQ frames: one op byte and a msgpack map with the public field names below.
Ops are a closed set. Token ids and handles travel as `bin` columns (int32 and uint32, little
endian). What a client sends is decoded strictly (unknown fields are errors); what an engine sends
may grow new fields within a major version, and clients ignore those they do not know.
"""

from __future__ import annotations

import enum
from typing import Annotated, ClassVar, Literal

import msgspec

from nanocore.protocol.errors import ErrorCode
from nanocore.protocol.sampling import EngineSamplingParams

PROTOCOL_VERSION = (1, 3)
"""[major, minor] of the wire, independent of the package's version."""

FinishReason = Literal["stop", "length", "abort", "error"]
ControlOperation = Literal["stats", "reset_prefix_cache", "pause", "resume", "read_file"]
Capability = Literal["prefix_caching", "priority"]
ModelFileName = Literal[
    "tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"
]
"""The files of a model that an engine serves to its clients: what tokenizing and chatting need."""

MAX_REQUEST_ID_CHARS = 256
MAX_CACHE_SALT_CHARS = 1024
MAX_FILE_BYTES = 64 * 2**20
"""A model's file above this is not served; a client need not take more."""
MAX_FILE_CHUNK_BYTES = 64 * 2**10
MAX_EXACT_INT = 2**53 - 1
"""The largest integer that every language's numbers hold exactly."""

ExactInt = Annotated[int, msgspec.Meta(ge=0, le=MAX_EXACT_INT)]


class Op(enum.IntEnum):
    """The op byte."""

    HELLO = 0x01
    WELCOME = 0x02
    REFUSED = 0x03
    SUBMIT = 0x10
    ACCEPTED = 0x11
    OUTPUT = 0x12
    ERROR = 0x13
    ABORT = 0x14
    PING = 0x20
    PONG = 0x21
    CONTROL = 0x30
    REPLY = 0x31
    BYE = 0x41


class Message(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Base of all messages; `op` is sent as the first frame."""

    op: ClassVar[Op]


class ModelFile(msgspec.Struct, frozen=True, kw_only=True):
    """A file that CONTROL read_file serves. sha256: of its content, 64 hex digits."""

    name: ModelFileName
    num_bytes: int
    sha256: str


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    """What a client must know about the model.

    model: the name or folder the engine was started with. vocab_size: valid ids are 0 up to it.
    max_model_len: tokens of prompt and output together. eos_token_ids: they end a request.
    block_size: tokens per KV block, the unit of prefix caching. num_blocks: blocks in the pool.
    default_sampling: of requests that bring no sampling parameters; its makers' recommendation.
    files: those of `ModelFileName` that the model has, so that a client needs no copy of it.
    """

    model: str
    architecture: str
    dtype: str
    vocab_size: int
    max_model_len: int
    eos_token_ids: list[int]
    block_size: int
    num_blocks: int
    default_sampling: EngineSamplingParams = EngineSamplingParams()
    files: list[ModelFile] = []


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """What this engine refuses to exceed. The queue's limits are None in engines that have none."""

    max_frame_bytes: int
    max_num_seqs: int
    max_request_id_chars: int = MAX_REQUEST_ID_CHARS
    max_cache_salt_chars: int = MAX_CACHE_SALT_CHARS
    ping_interval_ms: int
    session_timeout_ms: int
    max_num_queued_reqs: int | None = None
    max_num_queued_tokens: int | None = None
    max_file_chunk_bytes: int = MAX_FILE_CHUNK_BYTES


class Hello(Message, frozen=True, forbid_unknown_fields=True):
    """Client to engine: opens a session; nothing before it counts."""

    op = Op.HELLO
    protocol: tuple[int, int]
    client: str = ""


class Welcome(Message, frozen=True):
    """Engine to client: the session is open. capabilities: what not every engine does."""

    op = Op.WELCOME
    protocol: tuple[int, int]
    session: str
    engine_instance: str
    model: ModelCard
    limits: Limits
    capabilities: list[str] = []


class Refused(Message, frozen=True):
    """Engine to client: no session, and which versions would have one."""

    op = Op.REFUSED
    message: str
    supported: list[tuple[int, int]]


class Submit(Message, frozen=True, forbid_unknown_fields=True):
    """Client to engine: one request.

    prompt_token_ids: int32 little endian. sampling: None takes the model card's default_sampling.
    """

    op = Op.SUBMIT
    request_id: str
    prompt_token_ids: bytes
    sampling: EngineSamplingParams | None = None
    priority: int = 0
    cache_salt: str | None = None


class Accepted(Message, frozen=True):
    """Engine to client: the request is queued. handle: its short name in OUTPUT."""

    op = Op.ACCEPTED
    request_id: str
    handle: int
    seed: int


class Event(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What is rare in an OUTPUT: a request's start and its end.

    num_cached_tokens: with the first token; prompt tokens taken from the prefix cache.
    finish_reason: the last thing said of a request. stop_reason: the stop token id that ended it.
    message: with finish_reason "error", the cause.
    """

    handle: int
    num_cached_tokens: int | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None
    message: str | None = None


class Output(Message, frozen=True):
    """Engine to client: what one step, or several, produced for this client, as columns.

    handles: uint32 column, one entry per request with tokens. tokens: int32 column, in the order of
    handles. counts: uint32 column of tokens per handle, absent when every count is one.
    """

    op = Op.OUTPUT
    handles: bytes = b""
    tokens: bytes = b""
    counts: bytes | None = None
    events: list[Event] = []


class Error(Message, frozen=True):
    """Engine to client: what was refused, and why. request_id is absent if it is unknown."""

    op = Op.ERROR
    code: ErrorCode
    message: str
    request_id: str | None = None
    retry_after_s: float | None = None


class Abort(Message, frozen=True, forbid_unknown_fields=True):
    """Client to engine: end these requests. Idempotent; unknown ids are ignored."""

    op = Op.ABORT
    request_ids: list[str]


class Ping(Message, frozen=True):
    """Either way: answer with a PONG of the same nonce."""

    op = Op.PING
    nonce: ExactInt = 0


class Pong(Message, frozen=True):
    """Either way: I am here. num_steps: an engine's step counter, its heartbeat."""

    op = Op.PONG
    nonce: ExactInt = 0
    num_steps: int | None = None


class Control(Message, frozen=True, forbid_unknown_fields=True):
    """Client to engine: an operation, answered by REPLY with the call_id.

    operation: one of `ControlOperation`; others are answered, too: they cannot be done.
    file, offset: of read_file; which of the model card's files, and from which byte on.
    """

    op = Op.CONTROL
    call_id: ExactInt
    operation: str
    file: str | None = None
    offset: ExactInt = 0


class Stats(msgspec.Struct, frozen=True, kw_only=True):
    """Counters since the start and gauges of now; names are vLLM's where it has them."""

    num_requests_running: int
    num_requests_waiting: int
    kv_cache_usage_perc: float
    num_blocks: int
    num_free_blocks: int
    prefix_cache_queries: int
    prefix_cache_hits: int
    num_preemptions: int
    num_aborts: int
    prompt_tokens: int
    generation_tokens: int
    num_steps: int
    paused: bool
    prefix_cache_hit_rate: float = 0.0
    num_clients: int = 0
    num_protocol_errors: int = 0


class Reply(Message, frozen=True):
    """Engine to client: the outcome of a CONTROL. ok is False if it could not be done.

    stats: of "stats". data: of "read_file", at most max_file_chunk_bytes; empty at the file's end.
    """

    op = Op.REPLY
    call_id: ExactInt
    ok: bool = True
    message: str | None = None
    stats: Stats | None = None
    data: bytes | None = None


class Bye(Message, frozen=True):
    """Either way: the session is over. From an engine: it will not answer again."""

    op = Op.BYE
    reason: str = ""


FROM_CLIENT: tuple[type[Message], ...] = (Hello, Submit, Abort, Ping, Pong, Control, Bye)
FROM_ENGINE: tuple[type[Message], ...] = (
    Welcome, Refused, Accepted, Output, Error, Ping, Pong, Reply, Bye,
)  # fmt: skip
