"""A line of a step trace, typed. The keys are those that the engine writes.

Unknown keys are skipped, and those that older engines did not write have defaults. `scheduled` and
`computed` stay bytes until they are asked for: most steps repeat what the one before scheduled.
"""

from __future__ import annotations

import msgspec


class TraceError(ValueError):
    """A trace that cannot be read, or that does not hold what is asked for."""


class Arrival(msgspec.Struct, frozen=True):
    """A request that came to the scheduler.

    received_s: when its SUBMIT was taken from the socket; compiled_s: when its structured output
    was known, if that was waited for; arrived_s: when the scheduler had it. Seconds of the trace.
    leader: the sample that computes the prompt for this one.
    """

    id: str
    session: int
    priority: int
    prompt_tokens: int
    received_s: float
    arrived_s: float
    compiled_s: float | None = None
    leader: str | None = None


class Blocked(msgspec.Struct, frozen=True):
    """Who went first of those that a step left waiting, and what it lacked."""

    id: str
    by: str


class Step(msgspec.Struct):
    """One step. t_s: when it was planned, in seconds of its engine's trace."""

    step: int
    t_s: float
    duration_ms: float
    scheduled: msgspec.Raw
    computed: msgspec.Raw
    new: list[str]
    resumed: list[str]
    preempted: list[str]
    finished: list[str]
    cached: dict[str, int]
    num_running: int
    num_waiting: int
    free_blocks: int
    total_blocks: int
    token_budget: int
    arrived: list[Arrival] = []
    first: list[str] | None = None
    sent: dict[str, float] = {}
    preempted_by: dict[str, str] = {}
    cached_from: dict[str, list[str]] = {}
    blocked: Blocked | None = None

    @property
    def end_s(self) -> float:
        """When its result was taken in."""
        return self.t_s + self.duration_ms / 1e3


_COUNTS = msgspec.json.Decoder(dict[str, int])


def counts(raw: msgspec.Raw) -> dict[str, int]:
    """`scheduled` or `computed`: tokens by request id."""
    return _COUNTS.decode(raw)
