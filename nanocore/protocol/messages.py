"""The messages between a client and the engine. PROTOCOL.md is their specification.

A message is two ZeroMQ frames: one op byte and a msgpack map with the public field names below.
Ops are a closed set. Token ids and handles travel as `bin` columns (int32 and uint32, little
endian). What a client sends is decoded strictly (unknown fields are errors); what an engine sends
may grow new fields within a major version, and clients ignore those they do not know.
"""

from __future__ import annotations

import enum
from typing import Annotated, ClassVar, Final, Literal, get_args

import msgspec

from nanocore.protocol.errors import ErrorCode
from nanocore.protocol.fields import (
    MAX_CACHE_SALT_CHARS,
    MAX_EXACT_INT,
    MAX_REQUEST_ID_CHARS,
    CacheSalt,
    ExactInt,
    Float32Column,
    Handle,
    Int32Column,
    RequestId,
    Seed,
    Uint32Column,
    limited,
    since,
)
from nanocore.protocol.metrics import Metric, RecentSteps, Stats
from nanocore.protocol.sampling import DefaultSampling, EngineSamplingParams

PROTOCOL_VERSION = (1, 14)
"""[major, minor] of the wire, independent of the package's version."""

FinishReason = Literal["stop", "length", "abort", "error", "timeout"]
ControlOperation = Literal[
    "stats", "reset_prefix_cache", "pause", "resume", "read_file", "drain", "metrics", "steps"
]
ADMIN_OPERATIONS: Final = ("reset_prefix_cache", "pause", "drain")
"""Operations that concern all clients: refused to a session whose role is user."""
Role = Literal["user", "admin"]
Capability = Literal["prefix_caching", "priority", "structured_outputs", "embeddings"]
ModelFileName = Literal[
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "generation_config.json",
    "added_tokens.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "additional_chat_templates/tool_use.jinja",
]
"""The files of a model that an engine serves to its clients: what tokenizing and chatting need."""

MAX_FILE_BYTES = 64 * 2**20
"""A model's file above this is not served; a client need not take more."""
MAX_FILE_CHUNK_BYTES = 64 * 2**10
MIN_SESSION_TIMEOUT_MS = 1000
MAX_TIMEOUT_S = 1e6
MIN_PRIORITY, MAX_PRIORITY = -(2**31), 2**31 - 1


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
    DRAINING = 0x40
    BYE = 0x41


class Message(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Base of all messages; `op` is sent as the first frame."""

    op: ClassVar[Op]


class ModelFile(msgspec.Struct, frozen=True, kw_only=True):
    """A file that CONTROL read_file serves. sha256: of its content, 64 lower-case hex digits.

    name: a `ModelFileName`, or one of a later version.
    """

    name: Annotated[str, limited(enum=get_args(ModelFileName))]
    num_bytes: Annotated[int, limited(minimum=0, maximum=MAX_FILE_BYTES)]
    sha256: Annotated[str, limited(pattern="^[0-9a-f]{64}$")]


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    """Facts about the model that a client needs.

    model: the name or folder the engine was started with. vocab_size: valid ids are 0 up to it.
    max_model_len: tokens of prompt and output together. eos_token_ids: they end a request.
    block_size: tokens per KV block, the unit of prefix caching. num_blocks: blocks in the pool.
    default_sampling: of requests that bring no sampling parameters; its makers' recommendation.
    files: those of `ModelFileName` that the model has, so that a client needs no copy of it.
    hidden_size: numbers of an embedding; None in engines before 1.7.
    numerics_fingerprint: engines with the same one give a request the same logits to the bit,
    whatever runs beside it; None if an engine cannot promise it.
    """

    model: str
    architecture: str
    dtype: str
    vocab_size: Annotated[int, limited(minimum=1)]
    max_model_len: Annotated[int, limited(minimum=2)]
    eos_token_ids: list[int]
    block_size: Annotated[int, limited(minimum=1)]
    num_blocks: Annotated[int, limited(minimum=1)]
    default_sampling: Annotated[DefaultSampling, since(2)] = DefaultSampling()
    files: Annotated[list[ModelFile], since(3)] = []
    hidden_size: Annotated[int | None, since(7), limited(minimum=1)] = None
    numerics_fingerprint: Annotated[str | None, since(8), limited(pattern="^[0-9a-f]{32}$")] = None


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of this engine; None where there is no limit."""

    max_frame_bytes: int
    max_num_seqs: int
    max_request_id_chars: int = MAX_REQUEST_ID_CHARS
    max_cache_salt_chars: int = MAX_CACHE_SALT_CHARS
    ping_interval_ms: int
    session_timeout_ms: int
    max_num_queued_reqs: Annotated[int | None, since(1)] = None
    max_num_queued_tokens: Annotated[int | None, since(1)] = None
    max_file_chunk_bytes: Annotated[int, since(3)] = MAX_FILE_CHUNK_BYTES
    max_num_clients: Annotated[int | None, since(4)] = None
    max_logprobs: Annotated[int | None, since(5)] = None
    max_num_queued_bytes: Annotated[int | None, since(9)] = None


class Hello(Message, frozen=True, forbid_unknown_fields=True):
    """Client to engine: opens a session; nothing before it counts."""

    op = Op.HELLO
    protocol: tuple[ExactInt, ExactInt]
    client: str = ""


class Welcome(Message, frozen=True):
    """Engine to client: the session is open. capabilities: what not every engine does.

    role: what the client may do. ADMIN_OPERATIONS, and priorities below 0, are an admin's.
    """

    op = Op.WELCOME
    protocol: tuple[int, int]
    session: str
    engine_instance: Annotated[str, limited(pattern="^[0-9a-f]{32}$")]
    model: ModelCard
    limits: Limits
    capabilities: Annotated[list[str], since(3)] = []
    role: Annotated[str, since(12), limited(enum=get_args(Role))] = "admin"


class Refused(Message, frozen=True):
    """Engine to client: no session, and which versions would have one.

    retry_after_s: the version would do, but the engine has as many sessions as it serves.
    """

    op = Op.REFUSED
    message: str
    supported: list[tuple[int, int]]
    retry_after_s: Annotated[float | None, limited(minimum=0), since(4)] = None


class Submit(Message, frozen=True, forbid_unknown_fields=True):
    """Client to engine: one request.

    prompt_token_ids: int32 little endian. sampling: None takes the model card's default_sampling.
    output_token_ids: int32 little endian; what an earlier run of this request has produced. The
    request goes on behind them as that run would have: they count as output, and are not sent.
    timeout_s: after so long it ends with "timeout", whether it runs or waits.
    """

    op = Op.SUBMIT
    request_id: RequestId
    prompt_token_ids: Annotated[Int32Column, limited(column="int32", minItems=1)]
    sampling: EngineSamplingParams | None = None
    priority: Annotated[
        int, limited("lower values go first", minimum=MIN_PRIORITY, maximum=MAX_PRIORITY)
    ] = 0
    cache_salt: CacheSalt | None = None
    output_token_ids: Annotated[Int32Column, since(9), limited(column="int32")] = b""
    timeout_s: Annotated[
        float | None, since(9), limited(exclusiveMinimum=0, maximum=MAX_TIMEOUT_S)
    ] = None


class Accepted(Message, frozen=True):
    """Engine to client: the request is queued. handle: its short name in OUTPUT.

    Of several samples that of the first; the i-th one's is handle + i. seed: likewise. not_held:
    JSON pointers of what the grammar leaves out of structured_outputs.lenient.
    """

    op = Op.ACCEPTED
    request_id: RequestId
    handle: Handle
    seed: Seed
    not_held: Annotated[list[str], since(12)] = []


class Event(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A request's start or end in an OUTPUT.

    num_cached_tokens: with the first token; prompt tokens taken from the prefix cache.
    finish_reason: the last thing said of a request. stop_reason: which of stop_token_ids ended it.
    stop_cause: what else ended it with "stop", apart from EOS.
    message: the cause of an "error", or of an "abort" that the client did not ask for. code: of an
    "error" that the request's own parameters bring about.
    embedding: float32 column, with the "stop" of a request with `pooling`, which has no tokens.
    """

    handle: Handle
    num_cached_tokens: Annotated[int, limited(minimum=0)] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None
    message: str | None = None
    embedding: Annotated[Float32Column | None, since(7)] = None
    code: Annotated[Literal["invalid_request"] | None, since(12)] = None
    stop_cause: Annotated[Literal["repetition"] | None, since(14)] = None


class TokenLogprobs(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Log probabilities in columns: one entry per token, and for each of them some candidates.

    handles: uint32, whose token it is; those of one handle are in their order. ranks: uint32, the
    token's own, 1 is the most likely one. counts: uint32, how many candidates it has.
    token_ids: int32, logprobs: float32 (natural logarithms), of the candidates, token by token: the
    token itself, then the most likely ones in falling order.
    """

    handles: Uint32Column = b""
    ranks: Uint32Column = b""
    counts: Uint32Column = b""
    token_ids: Int32Column = b""
    logprobs: Float32Column = b""


class Output(Message, frozen=True):
    """Engine to client: what one step, or several, produced for this client, as columns.

    handles: uint32 column, one entry per request with tokens. tokens: int32 column, in the order of
    handles. counts: uint32 column of tokens per handle, absent when every count is one.
    logprobs: of these tokens, as far as their requests ask for them. prompt_logprobs: of prompt
    tokens from the second on, in pieces, the last one no later than the request's first token; of
    several samples under the first one's handle.
    """

    op = Op.OUTPUT
    handles: Uint32Column = b""
    tokens: Int32Column = b""
    counts: Uint32Column | None = None
    events: list[Event] = []
    logprobs: Annotated[TokenLogprobs | None, since(5)] = None
    prompt_logprobs: Annotated[TokenLogprobs | None, since(5)] = None


class Error(Message, frozen=True):
    """Engine to client: what was refused, and why. request_id is absent if it is unknown.

    code: an `ErrorCode`, or one of a later version.
    """

    op = Op.ERROR
    code: Annotated[str, limited(enum=get_args(ErrorCode))]
    message: str
    request_id: str | None = None
    retry_after_s: Annotated[float, limited(minimum=0)] | None = None


class Abort(Message, frozen=True, forbid_unknown_fields=True):
    """Client to engine: end these requests. Idempotent; unknown ids are ignored.

    handles: uint32 column, single samples to end, of this session's requests.
    """

    op = Op.ABORT
    request_ids: list[str]
    handles: Annotated[Uint32Column, since(5)] = b""


class Ping(Message, frozen=True):
    """Either way: answer with a PONG of the same nonce.

    session_timeout_ms: of a client; from now on close this session, while it has requests, after so
    long a silence, if that is less than the engine's own session_timeout_ms.
    """

    op = Op.PING
    nonce: ExactInt = 0
    session_timeout_ms: Annotated[
        Annotated[int, msgspec.Meta(ge=MIN_SESSION_TIMEOUT_MS, le=MAX_EXACT_INT)] | None, since(9)
    ] = None


class Pong(Message, frozen=True):
    """Either way: I am here. num_steps: an engine's step counter, its heartbeat.

    step_age_ms: of an engine; for how long the step that it is in has been running, 0 if none is.
    """

    op = Op.PONG
    nonce: ExactInt = 0
    num_steps: ExactInt | None = None
    step_age_ms: Annotated[ExactInt | None, since(4)] = None


class Control(Message, frozen=True, forbid_unknown_fields=True):
    """Client to engine: an operation, answered by REPLY with the call_id.

    operation: one of `ControlOperation`; others are answered, too: they cannot be done.
    file, offset: of read_file; which of the model card's files, and from which byte on.
    after: of steps; only those of larger numbers.
    """

    op = Op.CONTROL
    call_id: ExactInt
    operation: Annotated[str, limited(enum=get_args(ControlOperation))]
    file: Annotated[str | None, since(3)] = None
    offset: Annotated[ExactInt, since(3)] = 0
    after: Annotated[ExactInt, since(11)] = 0


class Reply(Message, frozen=True):
    """Engine to client: the outcome of a CONTROL. ok is False if it could not be done.

    stats: of "stats". data: of "read_file", at most max_file_chunk_bytes; empty at the file's end.
    metrics: of "metrics". steps: of "steps".
    """

    op = Op.REPLY
    call_id: ExactInt
    ok: bool = True
    message: str | None = None
    stats: Stats | None = None
    data: Annotated[bytes | None, since(3)] = None
    metrics: Annotated[list[Metric] | None, since(10)] = None
    steps: Annotated[RecentSteps | None, since(11)] = None


class Draining(Message, frozen=True):
    """Engine to client: it takes no new requests, ends when those it has have ended, or then.

    deadline_ms: from now; None: it waits for as long as they take. To sessions of 1.9 and later.
    """

    op = Op.DRAINING
    deadline_ms: Annotated[int | None, limited(minimum=0)] = None


class Bye(Message, frozen=True):
    """Either way: the session is over. From an engine: it will not answer again."""

    op = Op.BYE
    reason: str = ""


FROM_CLIENT: tuple[type[Message], ...] = (Hello, Submit, Abort, Ping, Pong, Control, Bye)
FROM_ENGINE: tuple[type[Message], ...] = (
    Welcome,
    Refused,
    Accepted,
    Output,
    Error,
    Ping,
    Pong,
    Reply,
    Draining,
    Bye,
)
