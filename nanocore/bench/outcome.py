"""One request of a benchmark: what is sent, and what was seen of its answer.

All times are `time.perf_counter()` seconds of the one process that measures.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TypeAlias

Prompt: TypeAlias = "str | array[int]"
"""A text, or token ids."""


@dataclass(frozen=True, slots=True)
class BenchRequest:
    """What is sent.

    num_prompt_tokens: None if there is no tokenizer to tell. num_output_tokens: the most to ask
    for. arrival_s: of a trace's request, since the trace's beginning.
    """

    prompt: Prompt
    num_prompt_tokens: int | None
    num_output_tokens: int
    arrival_s: float | None = None


@dataclass(slots=True)
class Outcome:
    """What came back. It failed if `error` says why.

    arrival_s: when the request was due; start_s: when it was sent, which is later if others had to
    end first. chunk_times_s: when tokens came, and chunk_tokens how many did each time. end_s: when
    the answer's end came. num_output_tokens: of the whole answer, as far as anybody tells.
    token_ids: where token ids come; their text is made after the measurement.
    """

    num_prompt_tokens: int
    arrival_s: float
    start_s: float
    chunk_times_s: list[float] = field(default_factory=list)
    chunk_tokens: list[int] = field(default_factory=list)
    end_s: float = 0.0
    num_output_tokens: int = 0
    text: str = ""
    token_ids: Sequence[int] = ()
    error: str = ""

    @property
    def ttft_s(self) -> float:
        """To the first token; 0 if none came."""
        return self.chunk_times_s[0] - self.start_s if self.chunk_times_s else 0.0

    @property
    def itls_s(self) -> list[float]:
        """Between one arrival of tokens and the next."""
        return [later - earlier for earlier, later in pairwise(self.chunk_times_s)]

    @property
    def latency_s(self) -> float:
        """To the answer's end; 0 if it has none."""
        return max(0.0, self.end_s - self.start_s)

    @property
    def queue_s(self) -> float:
        """From when it was due to when it was sent."""
        return self.start_s - self.arrival_s

    @property
    def tpot_s(self) -> float | None:
        """Per token after the first one; None if there is none."""
        if self.num_output_tokens < 2:
            return None
        return (self.latency_s - self.ttft_s) / (self.num_output_tokens - 1)

    def add_tokens(self, num_tokens: int, now_s: float) -> None:
        """Tokens have come."""
        self.chunk_times_s.append(now_s)
        self.chunk_tokens.append(num_tokens)
        self.end_s = now_s
