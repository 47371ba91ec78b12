"""A client's session: its requests, and what could not be sent to it yet.

Belongs to the io thread. A client that reads slowly costs memory for its tokens, not for messages:
whatever its socket does not take is merged, request by request, until it does.
"""

from __future__ import annotations

import itertools
import secrets
from collections import deque
from dataclasses import dataclass, field

import numpy as np

from nanocore.engine_core.outputs import ClientOutput
from nanocore.engine_core.request import TOKEN_DTYPE
from nanocore.protocol.codec import encode
from nanocore.protocol.messages import Event, Message, Output

HANDLE_DTYPE = np.dtype("<u4")


@dataclass(slots=True)
class Backlog:
    """Messages that wait for a slow client: single ones in order, tokens merged by request."""

    since_s: float  # when the client last took something
    messages: deque[Message] = field(default_factory=deque)
    tokens: dict[int, list[int]] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)

    def add(self, output: ClientOutput) -> None:
        """Merge a step's output."""
        for handle, token_id in zip(
            output.handles.tolist(), output.token_ids.tolist(), strict=True
        ):
            self.tokens.setdefault(handle, []).append(token_id)
        self.events += output.events

    def next(self) -> Message | None:
        """What is to be sent next: single messages first, because ACCEPTED precedes OUTPUT."""
        if self.messages:
            return self.messages[0]
        if not self.tokens and not self.events:
            return None
        columns = self.tokens.values()
        return Output(
            handles=np.fromiter(self.tokens, HANDLE_DTYPE).tobytes(),
            tokens=np.fromiter(itertools.chain.from_iterable(columns), TOKEN_DTYPE).tobytes(),
            counts=np.fromiter(map(len, columns), HANDLE_DTYPE).tobytes(),
            events=self.events,
        )

    def drop_next(self) -> None:
        """Forget what `next` returned, because it is sent."""
        if self.messages:
            self.messages.popleft()
        else:
            self.tokens, self.events = {}, []


@dataclass(slots=True)
class Session:
    """One client, from HELLO to BYE, its disappearance, or the engine's end.

    client: number in the engine, never reused. requests: handle by request id, of those not ended.
    """

    routing_id: bytes
    client: int
    last_seen_s: float
    session_id: str = field(default_factory=lambda: secrets.token_hex(8))
    requests: dict[str, int] = field(default_factory=dict)
    backlog: Backlog | None = None


def output_frames(output: ClientOutput) -> list[bytes]:
    """The OUTPUT message of one client's share of a step: two buffer copies."""
    return encode(
        Output(
            handles=output.handles.astype(HANDLE_DTYPE, copy=False).tobytes(),
            tokens=output.token_ids.astype(TOKEN_DTYPE, copy=False).tobytes(),
            events=output.events,
        )
    )
