"""What happens to a request, with times, from its queue to its end. Belongs to the step loop."""

from __future__ import annotations

from dataclasses import dataclass, field

from nanocore.protocol.metrics import MAX_MOVES, Phase


@dataclass(slots=True)
class Life:
    """When what happened to a request; 0 if it has not.

    queued_s: the scheduler got it. admitted_s: it first had a row. first_token_s, last_token_s: of
    its output. num_tokens: prompt and output, when it left its row last. num_preemptions: so often
    its row was taken from it.
    way: when it came into which phase; other threads may read it at any time.
    """

    queued_s: float = 0.0
    admitted_s: float = 0.0
    first_token_s: float = 0.0
    last_token_s: float = 0.0
    num_tokens: int = 0
    num_preemptions: int = 0
    way: list[tuple[Phase, float]] = field(default_factory=list)

    def admit(self, now_s: float) -> None:
        """It has a row, and what is known of it is computed."""
        self.admitted_s = self.admitted_s or now_s
        self.move("prefill", now_s)

    def preempt(self, now_s: float) -> None:
        """Its row was taken from it."""
        self.num_preemptions += 1
        self.move("preempted", now_s)

    def move(self, phase: Phase, now_s: float) -> None:
        """It comes into another phase. Of a long way the oldest moves but the first are dropped."""
        if len(self.way) == MAX_MOVES:
            del self.way[1]
        self.way.append((phase, now_s))
