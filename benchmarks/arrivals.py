"""The load of `under_load.py`: who arrives when, with what prompt.

Short requests arrive as a Poisson process, and a long prompt comes every so often among them. The
same seed gives the same arrivals, so that engines are compared under equal load. Prompts are random
token ids: nothing is shared, and no tokenizer takes part.
"""

from __future__ import annotations

import random
from array import array
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Load:
    """What arrives. rate: short requests per second, in the mean. duration_s: of the arrivals.

    short_tokens, long_tokens: of the prompts. output_tokens: of either. long_every_s: a long prompt
    comes at the middle of each such stretch.
    """

    rate: float
    duration_s: float
    short_tokens: int
    long_tokens: int
    output_tokens: int
    long_every_s: float


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request. time_s: since the start of the load."""

    time_s: float
    prompt_token_ids: array[int]
    is_long: bool


def draw_arrivals(load: Load, vocab_size: int, seed: str) -> list[Arrival]:
    """All arrivals of a load in the order of their times, at least one of either kind."""
    rng = random.Random(seed)  # of a str: the same on every platform

    def arrival(time_s: float, is_long: bool) -> Arrival:
        num_tokens = load.long_tokens if is_long else load.short_tokens
        prompt = array("i", rng.choices(range(vocab_size), k=num_tokens))
        return Arrival(time_s, prompt, is_long)

    arrivals = [arrival(0.0, False)]
    while (time_s := arrivals[-1].time_s + rng.expovariate(load.rate)) < load.duration_s:
        arrivals.append(arrival(time_s, False))
    num_long = max(1, int(load.duration_s / load.long_every_s))
    middle_s = min(load.long_every_s, load.duration_s) / 2
    arrivals += [arrival(middle_s + i * load.long_every_s, True) for i in range(num_long)]
    return sorted(arrivals, key=lambda each: each.time_s)
