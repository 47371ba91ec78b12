"""A client's session: its requests, and what could not be sent to it yet.

Belongs to the io thread. A client that reads slowly costs memory for its tokens, not for messages:
whatever its socket does not take is merged, request by request, until it does. Answers cannot be
merged, and log probabilities and embeddings are no smaller for it, so their bytes are counted: a
client that asks and does not read is cut off.
"""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from nanocore.engine_core.io.output_frames import output_frames
from nanocore.engine_core.io.token_log import TokenLog
from nanocore.engine_core.scheduling.columns import LogprobColumns
from nanocore.engine_core.scheduling.outputs import ClientOutput
from nanocore.protocol.messages import Event

MAX_BACKLOG_BYTES: Final = 8 * 2**20
"""Of one client's answers and log probabilities."""
MAX_BACKLOGS_BYTES: Final = 2**28
"""Of those of all clients together; beyond, the client goes that lets most wait."""
_LOOK_BYTES: Final = 2**20
_MESSAGE_OVERHEAD_BYTES: Final = 250  # of the objects that hold a message


@dataclass(slots=True)
class Backlog:
    """What waits for a slow client: encoded answers in order, and tokens merged by request.

    client: its number. since_s: when it last took something. num_bytes: of the answers, log
    probabilities and embeddings; logprobs_bytes: of these last two.
    """

    client: int
    since_s: float
    num_bytes: int = 0
    logprobs_bytes: int = 0
    _answers: deque[list[bytes]] = field(default_factory=deque)
    _tokens: TokenLog = field(default_factory=TokenLog)
    _events: list[Event] = field(default_factory=list)
    _prompt_logprobs: list[LogprobColumns] = field(default_factory=list)
    _outputs: deque[list[bytes]] = field(default_factory=deque)
    _unsent_logprobs_bytes: int = 0  # of _outputs

    def add_answer(self, frames: list[bytes]) -> bool:
        """Append a message that is not an OUTPUT; whether it is time to look at the limits."""
        self._answers.append(frames)
        return self._count(_num_bytes(frames))

    def add(self, output: ClientOutput) -> bool:
        """Let a step's output for this client wait; `next` merges its tokens by request.

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
        """Let encoded messages of one output wait, the first of which were sent."""
        self._outputs += outputs
        self._unsent_logprobs_bytes += logprobs_bytes
        self.logprobs_bytes += logprobs_bytes
        return self._count(logprobs_bytes)

    def next(self) -> list[bytes] | None:
        """What is to be sent next: answers first, because ACCEPTED precedes OUTPUT.

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
        """Forget what `next` returned, because it is sent."""
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


@dataclass(slots=True)
class Session:
    """One client, from HELLO to BYE, its disappearance, or the engine's end.

    client: number in the engine, never reused. requests: by request id, of those not ended, the
    handles of the samples that have not.
    is_admin: its key's role. num_calls: CONTROLs that the step loop has yet to answer. has_paused:
    it holds a pause.
    minor: version of the protocol that is spoken. patience: how many checks in a row may find that
    nothing was heard, while it has requests; None: as the engine has it. num_silent_checks: that
    have, since something was heard.
    """

    routing_id: bytes
    client: int
    last_seen_s: float
    session_id: str = field(default_factory=lambda: secrets.token_hex(8))
    requests: dict[str, list[int]] = field(default_factory=dict)
    is_admin: bool = True
    num_calls: int = 0
    has_paused: bool = False
    minor: int = 0
    patience: int | None = None
    num_silent_checks: int = 0
    backlog: Backlog | None = None

    @property
    def is_given_up(self) -> bool:
        """Whether it was silent for longer than it wants to be waited for.

        Checks are counted, and not the clock's time: an engine that stood still itself, and hears
        only now what was sent meanwhile, closes nobody's session for it.
        """
        is_served = bool(self.requests) and not self.has_paused
        return self.patience is not None and is_served and self.num_silent_checks >= self.patience


def over_limit(slow: Iterable[Session], max_bytes: int = MAX_BACKLOGS_BYTES) -> Session | None:
    """The session that lets most bytes wait, if these are too many, or those of all are.

    max_bytes: of those of all.
    """
    sizes = [(one.backlog.num_bytes, one.client, one) for one in slow if one.backlog]
    most_bytes, _, most = max(sizes)
    all_bytes = sum(num_bytes for num_bytes, _, _ in sizes)
    return most if most_bytes >= MAX_BACKLOG_BYTES or all_bytes > max_bytes else None


def _num_bytes(frames: list[bytes]) -> int:
    return sum(map(len, frames)) + _MESSAGE_OVERHEAD_BYTES
