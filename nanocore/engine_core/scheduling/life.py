"""What happens to a request, with times, from its queue to its end. Belongs to the step loop."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Life:
    """When what happened to a request; 0 if it has not.

    queued_s: the scheduler got it. admitted_s: it first had a row. first_token_s, last_token_s: of
    its output. num_tokens: prompt and output, when it left its row last. num_preemptions: so often
    its row was taken from it.
    """

    queued_s: float = 0.0
    admitted_s: float = 0.0
    first_token_s: float = 0.0
    last_token_s: float = 0.0
    num_tokens: int = 0
    num_preemptions: int = 0
