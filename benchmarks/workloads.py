"""The workloads: W1 to W5 of every comparison on a CPU, and nano-vllm's on a GPU.

Prompts are token ids, so that no tokenizer takes part. All requests of a workload are submitted at
once and ignore EOS, so each yields exactly the output tokens it asks for. Prompts are drawn anew
for every (workload, repetition): prefixes repeat only where a workload means them to. Lengths never
change, so repetitions are equal work.

Decoding is greedy. "W1+top_k+top_p" is W1 sampled at temperature 1 with these filters, and
"W1+temperature" with none.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final


@dataclass(frozen=True, slots=True)
class BenchmarkRequest:
    """One request: the prompt's token ids, and how many tokens to generate."""

    prompt_token_ids: tuple[int, ...]
    num_output_tokens: int


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests that are submitted together.

    sampling: of them all, by the names that vLLM and we give parameters; none: greedy.
    """

    name: str
    requests: tuple[BenchmarkRequest, ...]
    sampling: dict[str, float] = field(default_factory=dict)

    @property
    def num_prompt_tokens(self) -> int:
        """Prompt tokens of all requests."""
        return sum(len(request.prompt_token_ids) for request in self.requests)

    @property
    def num_output_tokens(self) -> int:
        """Output tokens of all requests."""
        return sum(request.num_output_tokens for request in self.requests)

    def describe(self) -> dict[str, Any]:
        """What a report says of it."""
        return {
            "sampling": self.sampling,
            "num_requests": len(self.requests),
            "num_prompt_tokens": self.num_prompt_tokens,
            "num_output_tokens": self.num_output_tokens,
        }


Draw = Callable[[int], tuple[int, ...]]
"""Draws so many token ids."""


def _decode_batch(draw: Draw) -> list[BenchmarkRequest]:
    return [BenchmarkRequest(draw(128), 128) for _ in range(16)]


def _prefill(draw: Draw) -> list[BenchmarkRequest]:
    return [BenchmarkRequest(draw(1024), 8) for _ in range(8)]


def _shared_prefix(draw: Draw) -> list[BenchmarkRequest]:
    shared = draw(768)
    return [BenchmarkRequest(shared + draw(32), 32) for _ in range(32)]


def _mixed_lengths(draw: Draw) -> list[BenchmarkRequest]:
    lengths = random.Random(4)  # apart from the prompts: these stay the same
    pairs = [(lengths.randint(32, 256), lengths.randint(32, 256)) for _ in range(32)]
    return [BenchmarkRequest(draw(num_in), num_out) for num_in, num_out in pairs]


def _single(draw: Draw) -> list[BenchmarkRequest]:
    return [BenchmarkRequest(draw(128), 128)]


_DEFINITIONS: dict[str, Callable[[Draw], list[BenchmarkRequest]]] = {
    "W1": _decode_batch,
    "W2": _prefill,
    "W3": _shared_prefix,
    "W4": _mixed_lengths,
    "W5": _single,
}
WORKLOAD_NAMES = tuple(_DEFINITIONS)
SAMPLING: Final[dict[str, dict[str, float]]] = {
    "temperature": {},
    "min_p": {"min_p": 0.05},
    "top_k": {"top_k": 50},
    "top_p": {"top_p": 0.9},
}
"""What may follow a workload's name, and what it adds to a temperature of 1."""


def make_workload(name: str, vocab_size: int, repetition: int) -> Workload:
    """One repetition of a workload; the same arguments always give the same requests.

    Raises:
        KeyError: a name that is not in WORKLOAD_NAMES, or not in SAMPLING behind a "+".
    """
    base, *added = name.split("+")
    sampling = {"temperature": 1.0} if added else {}
    for part in added:
        sampling |= SAMPLING[part]
    drawn = random.Random(f"{name}/{repetition}")  # of a str: the same on every platform
    ids = range(vocab_size)
    requests = _DEFINITIONS[base](lambda count: tuple(drawn.choices(ids, k=count)))
    return Workload(name, tuple(requests), sampling)


def workload_names(text: str) -> list[str]:
    """Names given by commas, for argparse."""
    names = text.split(",")
    for name in names:
        base, *added = name.split("+")
        if base not in WORKLOAD_NAMES or not {*added} <= {*SAMPLING}:
            known = f"{','.join(WORKLOAD_NAMES)}, each with any of +{', +'.join(SAMPLING)}"
            raise argparse.ArgumentTypeError(f"unknown: {name}; known: {known}")
    return names


def nano_vllm_workload(
    vocab_size: int, repetition: int = 0, small: bool = False
) -> list[BenchmarkRequest]:
    """nano-vllm's benchmark: 256 requests of 100 to 1,024 prompt and as many output tokens.

    Drawn as its bench.py draws them, with seed 0, so all engines have the work for which figures
    are published. Repetition 0 has its prompts, others have other prompts of the same lengths: no
    engine may find one in its prefix cache.
    """
    num_requests, shortest, longest = (6, 4, 24) if small else (256, 100, 1024)
    highest = min(10_000, vocab_size - 1)
    rng = random.Random(0)
    prompts = [
        [rng.randint(0, highest) for _ in range(rng.randint(shortest, longest))]
        for _ in range(num_requests)
    ]
    num_outputs = [rng.randint(shortest, longest) for _ in range(num_requests)]
    if repetition:
        other = random.Random(f"prompts {repetition}")  # 1 and -1 are the same seed as numbers
        prompts = [[other.randint(0, highest) for _ in prompt] for prompt in prompts]
    pairs = zip(prompts, num_outputs, strict=True)
    return [BenchmarkRequest(tuple(prompt), count) for prompt, count in pairs]
