"""A client's session: its requests, and what could not be sent to it yet.

Belongs to the io thread. A client that reads slowly costs memory for its tokens, not for messages:
whatever its socket does not take is merged, request by request, until it does. Answers cannot be
merged, so their bytes are counted: a client that asks and does not read is cut off.
"""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from nanocore.engine_core.io.token_log import TokenLog
from nanocore.engine_core.scheduling.outputs import ClientOutput
from nanocore.engine_core.scheduling.request import TOKEN_DTYPE
from nanocore.engine_core.scheduling.token_columns import TokenColumns
from nanocore.protocol.codec import encode
from nanocore.protocol.messages import Event, Output

MAX_BACKLOG_BYTES: Final = 8 * 2**20
"""Of one client's answers."""
MAX_BACKLOGS_BYTES: Final = 2**28
"""Of those of all clients together; beyond, the client goes that lets most wait."""
_LOOK_BYTES: Final = 2**20
_MESSAGE_OVERHEAD_BYTES: Final = 250  # of the objects that hold a message
HANDLE_DTYPE = np.dtype("<u4")


@dataclass(slots=True)
class Backlog:
    """What waits for a slow client: encoded answers in order, and tokens merged by request.

    since_s: when the client last took something. num_bytes: of the answers.
    """

    since_s: float
    num_bytes: int = 0
    _answers: deque[list[bytes]] = field(default_factory=deque)
    _tokens: TokenLog = field(default_factory=TokenLog)
    _events: list[Event] = field(default_factory=list)
    _merged: list[bytes] | None = None

    def add_answer(self, frames: list[bytes]) -> bool:
        """Append a message that is not an OUTPUT; whether it is time to look at the limits."""
        self._answers.append(frames)
        before = self.num_bytes
        self.num_bytes += _num_bytes(frames)
        return before // _LOOK_BYTES != self.num_bytes // _LOOK_BYTES

    def add(self, output: ClientOutput) -> None:
        """Let a step's output for this client wait; `next` merges its tokens by request."""
        self._tokens.add(output.tokens)
        self._events += output.events

    def next(self) -> list[bytes] | None:
        """What is to be sent next: answers first, because ACCEPTED precedes OUTPUT.

        Tokens are merged when it is their turn, once: sending them may be tried many times.
        """
        if self._answers:
            return self._answers[0]
        if self._merged is None and (self._tokens or self._events):
            self._merged = output_frames(self._tokens.merged(), self._events)
            self._tokens, self._events = TokenLog(), []
        return self._merged

    def drop_next(self) -> None:
        """Forget what `next` returned, because it is sent."""
        if self._answers:
            self.num_bytes -= _num_bytes(self._answers.popleft())
        else:
            self._merged = None


@dataclass(slots=True)
class Session:
    """One client, from HELLO to BYE, its disappearance, or the engine's end.

    client: number in the engine, never reused. requests: handle by request id, of those not ended.
    num_calls: CONTROLs that the step loop has yet to answer. has_paused: it may hold a pause.
    """

    routing_id: bytes
    client: int
    last_seen_s: float
    session_id: str = field(default_factory=lambda: secrets.token_hex(8))
    requests: dict[str, int] = field(default_factory=dict)
    num_calls: int = 0
    has_paused: bool = False
    backlog: Backlog | None = None


def over_limit(slow: Iterable[Session], max_bytes: int = MAX_BACKLOGS_BYTES) -> Session | None:
    """The session that lets most answers wait, if these are too many, or those of all are.

    max_bytes: of those of all.
    """
    sizes = [(one.backlog.num_bytes, one.client, one) for one in slow if one.backlog]
    most_bytes, _, most = max(sizes)
    all_bytes = sum(num_bytes for num_bytes, _, _ in sizes)
    return most if most_bytes >= MAX_BACKLOG_BYTES or all_bytes > max_bytes else None


def _num_bytes(frames: list[bytes]) -> int:
    return sum(map(len, frames)) + _MESSAGE_OVERHEAD_BYTES


def output_frames(tokens: TokenColumns, events: list[Event]) -> list[bytes]:
    """The OUTPUT message of one client's tokens, by handle, and events: two buffer copies."""
    counts = tokens.counts
    return encode(
        Output(
            handles=tokens.owners.astype(HANDLE_DTYPE, copy=False).tobytes(),
            tokens=tokens.token_ids.astype(TOKEN_DTYPE, copy=False).tobytes(),
            counts=None if counts is None else counts.astype(HANDLE_DTYPE).tobytes(),
            events=events,
        )
    )
