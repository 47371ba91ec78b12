"""The life of one request, as far as a trace tells it. All times are seconds of its run's trace."""

from __future__ import annotations

from dataclasses import dataclass, field

from nanocore.tracing.step import Arrival


@dataclass(slots=True)
class Chunk:
    """Tokens of a prompt, or of one that is computed again, that one step computed."""

    begin_s: float
    end_s: float
    num_tokens: int
    num_computed: int


@dataclass(slots=True)
class DecodeRun:
    """Steps that each computed the last known token, with nothing else between."""

    begin_s: float
    end_s: float
    num_steps: int
    num_tokens: int


@dataclass(slots=True)
class Preemption:
    """by: id of the request that it was for; its own if there was no other way. None: not told."""

    at_s: float
    by: str | None
    resumed_s: float | None = None


@dataclass(slots=True)
class Life:
    """One request, or one sample of several.

    number: among those of its run, from 1. arrival: None in traces of older engines, and for those
    that had come before the trace begins. admitted_s: its first row; first_s: the end of the step
    that sampled its first token; sent_s: when the io thread had handed that over; ended_s: the end
    of the step with which it ended. cached_from: requests whose blocks it hit. is_shared: another
    session used the id at the same time, so this holds something of both.
    """

    id: str
    number: int
    arrival: Arrival | None = None
    admitted_s: float | None = None
    cached_tokens: int = 0
    cached_from: list[str] = field(default_factory=list)
    work: list[Chunk | DecodeRun] = field(default_factory=list)
    preemptions: list[Preemption] = field(default_factory=list)
    first_s: float | None = None
    sent_s: float | None = None
    ended_s: float | None = None
    is_shared: bool = False

    @property
    def begin_s(self) -> float:
        """The first that the trace knows of it."""
        if self.arrival is not None:
            return self.arrival.received_s
        times = [one.at_s for one in self.preemptions] + [one.begin_s for one in self.work]
        known = [one for one in (self.admitted_s, self.ended_s, *times) if one is not None]
        return min(known, default=0.0)

    @property
    def ttft_s(self) -> float | None:
        """From its SUBMIT to its first token, handed to the socket if that is known."""
        if self.first_s is None:
            return None
        end_s = self.first_s if self.sent_s is None else self.sent_s
        return max(0.0, end_s - self.begin_s)

    @property
    def num_computed(self) -> int:
        """Tokens that were computed of it since it last got a row, and cached ones before them."""
        num_decoded = 0
        for one in reversed(self.work):
            if isinstance(one, Chunk):
                return one.num_computed + one.num_tokens + num_decoded
            num_decoded += one.num_tokens
        return num_decoded

    @property
    def chunks(self) -> list[Chunk]:
        """What was computed of its prompt, or again."""
        return [one for one in self.work if isinstance(one, Chunk)]
