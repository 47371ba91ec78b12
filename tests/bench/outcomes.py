"""Outcomes made by hand, for tests of what is made of them."""

from __future__ import annotations

from nanocore.bench.load import Outcome


def outcome(
    start_s: float, chunks: list[tuple[float, int]], num_prompt_tokens: int = 10, error: str = ""
) -> Outcome:
    """One that was sent when it was due. chunks: (time, tokens)."""
    made = Outcome(num_prompt_tokens, start_s, start_s)
    for time_s, num_tokens in chunks:
        made.add_tokens(num_tokens, time_s)
    made.num_output_tokens = sum(num_tokens for _, num_tokens in chunks)
    made.error = error
    return made


FIRST = outcome(100.0, [(100.5, 1), (100.75, 1), (101.25, 2)])
"""TTFT 0.5 s, gaps 0.25 and 0.5 s, 1.25 s in all, 4 tokens: a TPOT of 0.25 s."""
SECOND = outcome(100.25, [(101.25, 1)], num_prompt_tokens=20)
"""TTFT 1 s, no gap, 1 s in all, 1 token: no TPOT."""
FAILED = outcome(100.5, [(100.75, 1)], num_prompt_tokens=30, error="HTTP 500")
