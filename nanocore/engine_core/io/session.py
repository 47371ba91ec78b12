"""Sessions of clients: their requests, and output that could not be sent yet.

Belongs to the io thread. A client that reads slowly costs memory for its tokens, not for messages:
what its socket does not take is merged, request by request. Replies cannot be merged, and log
probabilities and embeddings do not shrink, so their bytes are counted: a client that requests and
does not read is disconnected.
"""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Final

import msgspec
import numpy as np

from nanocore.engine_core.requests.request import TOKEN_DTYPE
from nanocore.engine_core.scheduling.columns import (
    IntArray,
    LogprobColumns,
    TokenColumns,
    places_of,
)
from nanocore.engine_core.scheduling.outputs import ClientOutput
from nanocore.protocol.codec import encode
from nanocore.protocol.messages import Event, Output, TokenLogprobs


class TokenLog(msgspec.Struct):
    """Tokens for a slow client, appended step by step, merged by request when it reads.

    Tokens are kept in flat columns in order of arrival, eight bytes a token. Log probabilities name
    their owners, so they are merged as they are.
    """

    _handles: bytearray = msgspec.field(default_factory=bytearray)
    _token_ids: bytearray = msgspec.field(default_factory=bytearray)
    _logprobs: list[LogprobColumns] = msgspec.field(default_factory=list)

    def __len__(self) -> int:
        return len(self._token_ids) // TOKEN_DTYPE.itemsize

    def add(self, tokens: TokenColumns) -> None:
        self._handles += tokens.owner_of_each().astype(np.uint32, copy=False).tobytes()
        self._token_ids += tokens.token_ids.astype(TOKEN_DTYPE, copy=False).tobytes()
        if tokens.logprobs is not None:
            self._logprobs.append(tokens.logprobs)

    def merged(self) -> TokenColumns:
        """Group all tokens by request, requests in order of their first token."""
        handles, first, owners, counts = np.unique(
            np.frombuffer(self._handles, np.uint32),
            return_index=True,
            return_inverse=True,
            return_counts=True,
        )
        by_arrival = np.argsort(first)
        order = np.argsort(np.argsort(by_arrival)[owners], kind="stable")
        token_ids = np.frombuffer(self._token_ids, TOKEN_DTYPE)[order]
        logprobs = LogprobColumns.joined(self._logprobs) if self._logprobs else None
        return TokenColumns(handles[by_arrival], token_ids, counts[by_arrival], logprobs)


class SessionTable:
    """The open sessions and their requests, indexed. Only its methods change its dictionaries.

    Client numbers and handles are never reused: those of what has ended find nothing.

    by_peer: by routing id. by_client: by number. slow: sessions with a backlog, by number.
    request_ids: by handle, for all open samples.
    """

    def __init__(self) -> None:
        self.by_peer: dict[bytes, Session] = {}
        self.by_client: dict[int, Session] = {}
        self.slow: dict[int, Session] = {}
        self.request_ids: dict[int, str] = {}
        self._num_opened = 0

    def __len__(self) -> int:
        return len(self.by_peer)

    def has(self, session: Session) -> bool:
        """Whether the session is open."""
        return self.by_client.get(session.client) is session

    def open(self, routing_id: bytes, now_s: float) -> Session:
        """Open a session for a peer, which must have none."""
        self._num_opened += 1
        session = Session(routing_id, self._num_opened, now_s)
        self.by_peer[routing_id] = self.by_client[session.client] = session
        return session

    def close(self, session: Session) -> list[int]:
        """Remove a session and its requests; return the handles of its samples."""
        del self.by_peer[session.routing_id], self.by_client[session.client]
        self.slow.pop(session.client, None)
        handles = [handle for own in session.requests.values() for handle in own]
        for handle in handles:
            del self.request_ids[handle]
        session.requests = {}
        return handles

    def add_request(self, session: Session, request_id: str, handles: Sequence[int]) -> None:
        """Add an accepted request. handles: its samples."""
        session.requests[request_id] = [*handles]
        self.request_ids.update(dict.fromkeys(handles, request_id))

    def owns(self, session: Session, handle: int) -> bool:
        """Whether the handle is an open sample of the session."""
        request_id = self.request_ids.get(handle)
        return request_id is not None and handle in session.requests.get(request_id, ())

    def end_request(self, session: Session, handle: int) -> None:
        """Remove a sample, if it is open; with its last sample the request's id becomes free."""
        request_id = self.request_ids.pop(handle, None)
        if request_id is not None:
            session.requests[request_id].remove(handle)
            if not session.requests[request_id]:
                del session.requests[request_id]

    def hold_back(self, session: Session, now_s: float) -> Backlog:
        """Give a slow client a backlog, which takes what its socket does not."""
        session.backlog = Backlog(session.client, now_s)
        self.slow[session.client] = session
        return session.backlog

    def catch_up(self, session: Session) -> None:
        """Drop the backlog of a client that has caught up."""
        session.backlog = None
        del self.slow[session.client]


MAX_BACKLOG_BYTES: Final = 8 * 2**20
"""Limit of one client's unsent replies and log probabilities."""
MAX_BACKLOGS_BYTES: Final = 2**28
"""Limit for all clients together; above it, the client with the largest backlog is disconnected."""
_LOOK_BYTES: Final = 2**20
_MESSAGE_OVERHEAD_BYTES: Final = 250  # of the objects that hold a message


class Backlog(msgspec.Struct):
    """Unsent messages of a slow client: encoded replies in order, and tokens merged by request.

    client: its number. since_s: when it last took something. num_bytes: replies, log probabilities
    and embeddings; logprobs_bytes: the last two.
    """

    client: int
    since_s: float
    num_bytes: int = 0
    logprobs_bytes: int = 0
    _answers: deque[list[bytes]] = msgspec.field(default_factory=deque)
    _tokens: TokenLog = msgspec.field(default_factory=TokenLog)
    _events: list[Event] = msgspec.field(default_factory=list)
    _prompt_logprobs: list[LogprobColumns] = msgspec.field(default_factory=list)
    _outputs: deque[list[bytes]] = msgspec.field(default_factory=deque)
    _unsent_logprobs_bytes: int = 0  # of _outputs

    def add_answer(self, frames: list[bytes]) -> bool:
        """Append a message that is not an OUTPUT; return whether to check the limits."""
        self._answers.append(frames)
        return self._count(_num_bytes(frames))

    def add(self, output: ClientOutput) -> bool:
        """Add a step's output for this client; `next` merges its tokens by request.

        Returns whether it is time to look at the limits.
        """
        self._tokens.add(output.tokens)
        self._events += output.events
        if output.prompt_logprobs is not None:
            self._prompt_logprobs.append(output.prompt_logprobs)
        num_bytes = output.num_logprobs_bytes
        self.logprobs_bytes += num_bytes
        return self._count(num_bytes)

    def add_rest(self, outputs: list[list[bytes]], logprobs_bytes: int) -> bool:
        """Add encoded messages of an output whose first messages were sent."""
        self._outputs += outputs
        self._unsent_logprobs_bytes += logprobs_bytes
        self.logprobs_bytes += logprobs_bytes
        return self._count(logprobs_bytes)

    def next(self) -> list[bytes] | None:
        """Return the message to send next: replies first, because ACCEPTED precedes OUTPUT.

        Tokens are merged when it is their turn, once: sending them may be tried many times.
        """
        if self._answers:
            return self._answers[0]
        if not self._outputs and (self._tokens or self._events or self._prompt_logprobs):
            prompts = self._prompt_logprobs
            joined = LogprobColumns.joined(prompts) if prompts else None
            merged = ClientOutput(self.client, self._tokens.merged(), self._events, joined)
            self._outputs += output_frames(merged)
            self._unsent_logprobs_bytes = merged.num_logprobs_bytes
            self._tokens, self._events, self._prompt_logprobs = TokenLog(), [], []
        return self._outputs[0] if self._outputs else None

    def drop_next(self) -> None:
        """Remove the message that `next` returned, after it was sent."""
        if self._answers:
            self.num_bytes -= _num_bytes(self._answers.popleft())
            return
        self._outputs.popleft()
        if not self._outputs:
            self.num_bytes -= self._unsent_logprobs_bytes
            self.logprobs_bytes -= self._unsent_logprobs_bytes
            self._unsent_logprobs_bytes = 0

    def _count(self, num_bytes: int) -> bool:
        before = self.num_bytes
        self.num_bytes += num_bytes
        return before // _LOOK_BYTES != self.num_bytes // _LOOK_BYTES


class Session(msgspec.Struct):
    """One client, from HELLO to BYE, its disconnection, or the engine's end.

    client: number in the engine, never reused. requests: handles of open samples, by request id.
    num_calls: CONTROLs that the step loop has yet to answer. minor: protocol version in use.
    max_silent_checks: consecutive silent checks before the session is closed while it has open
    requests; None uses the engine's timeout. num_silent_checks: checks since something was heard.
    """

    routing_id: bytes
    client: int
    last_seen_s: float
    session_id: str = msgspec.field(default_factory=lambda: secrets.token_hex(8))
    requests: dict[str, list[int]] = msgspec.field(default_factory=dict)
    is_admin: bool = True
    num_calls: int = 0
    has_paused: bool = False
    minor: int = 0
    max_silent_checks: int | None = None
    num_silent_checks: int = 0
    backlog: Backlog | None = None

    @property
    def is_given_up(self) -> bool:
        """Whether the client was silent for longer than its session timeout.

        Checks are counted, not time: an engine that stood still itself, and hears only now what was
        sent meanwhile, closes no session for it.
        """
        limit = self.max_silent_checks
        is_served = bool(self.requests) and not self.has_paused
        return limit is not None and is_served and self.num_silent_checks >= limit


def _num_bytes(frames: list[bytes]) -> int:
    return sum(map(len, frames)) + _MESSAGE_OVERHEAD_BYTES


HANDLE_DTYPE: Final = np.dtype("<u4")
FLOAT_DTYPE: Final = np.dtype("<f4")
MAX_LOGPROBS_BYTES: Final = 2**19
"""Limit per message; one more token's logprobs may be in it, less than 8 MiB in any vocabulary."""


def output_frames(
    output: ClientOutput, max_logprobs_bytes: int = MAX_LOGPROBS_BYTES
) -> list[list[bytes]]:
    """Encode an output as messages, in order; usually one, with two buffer copies.

    A frame above `max_frame_bytes` would end the client's connection. With a whole vocabulary each
    token brings megabytes of log probabilities, and each end of some requests an embedding.
    If there are several, prompts' log probabilities come first, tokens' with their tokens, and ends
    last; of these the embeddings come last.
    """
    if output.num_logprobs_bytes <= max_logprobs_bytes:
        return [_encode(output)]
    client, nothing = output.client, TokenColumns(np.zeros(0, np.uint32), np.zeros(0, np.int32))
    prompts = []
    if (entries := output.prompt_logprobs) is not None:
        parts = map(entries.take, _cut(entries.bytes_of_each, max_logprobs_bytes))
        prompts = [ClientOutput(client, nothing, [], part) for part in parts]
    outputs = [
        ClientOutput(client, part) for part in _cut_tokens(output.tokens, max_logprobs_bytes)
    ]
    ends = [event for event in output.events if event.embedding is not None]
    for event in output.events:
        if event.embedding is None:
            outputs[0 if event.finish_reason is None else -1].events.append(event)
    num_bytes = np.array([len(event.embedding or b"") for event in ends], np.int64)
    embeddings = [
        ClientOutput(client, nothing, [ends[i] for i in part])
        for part in _cut(num_bytes, max_logprobs_bytes)
        if len(part)
    ]
    return [_encode(one) for one in prompts + outputs + embeddings]


def _encode(output: ClientOutput) -> list[bytes]:
    tokens, counts, prompts = output.tokens, output.tokens.counts, output.prompt_logprobs
    return encode(
        Output(
            handles=tokens.owners.astype(HANDLE_DTYPE, copy=False).tobytes(),
            tokens=tokens.token_ids.astype(TOKEN_DTYPE, copy=False).tobytes(),
            counts=None if counts is None else counts.astype(HANDLE_DTYPE).tobytes(),
            events=output.events,
            logprobs=None if tokens.logprobs is None else _said(tokens.logprobs),
            prompt_logprobs=None if prompts is None else _said(prompts),
        )
    )


def _said(entries: LogprobColumns) -> TokenLogprobs:
    return TokenLogprobs(
        handles=entries.owners.astype(HANDLE_DTYPE, copy=False).tobytes(),
        ranks=entries.ranks.astype(HANDLE_DTYPE).tobytes(),
        counts=entries.counts.astype(HANDLE_DTYPE).tobytes(),
        token_ids=entries.token_ids.astype(TOKEN_DTYPE, copy=False).tobytes(),
        logprobs=entries.logprobs.astype(FLOAT_DTYPE, copy=False).tobytes(),
    )


def _cut_tokens(tokens: TokenColumns, max_bytes: int) -> Iterator[TokenColumns]:
    """Yield tokens with their logprobs in parts, at least one."""
    entries, owners = tokens.logprobs, tokens.owner_of_each().astype(np.int64)
    if entries is None:
        yield tokens
        return
    owner_of_each = places_of(entries.owners, tokens.owners)
    entries = entries.take(np.argsort(owner_of_each, kind="stable"))  # as the tokens are
    has_entry = np.isin(owners, entries.owners)
    entry_of_each = np.cumsum(has_entry) - 1
    num_bytes = np.zeros(len(owners), np.int64)
    num_bytes[has_entry] = entries.bytes_of_each
    for part in _cut(num_bytes, max_bytes):
        starts = np.flatnonzero(np.diff(owners[part], prepend=-1))
        own = entry_of_each[part][has_entry[part]]
        yield TokenColumns(
            owners[part][starts],
            tokens.token_ids[part],
            np.diff(starts, append=len(part)),
            entries.take(own) if len(own) else None,
        )


def _cut(num_bytes: IntArray, max_bytes: int) -> list[IntArray]:
    """Split indices into consecutive parts of max_bytes and at most one entry more."""
    part_of_each = (np.cumsum(num_bytes) - num_bytes) // max_bytes
    return np.split(np.arange(len(num_bytes)), np.flatnonzero(np.diff(part_of_each)) + 1)
