"""The workloads: W1 to W5 of every comparison on a CPU, and nano-vllm's on a GPU.

Prompts are token ids, so that no tokenizer takes part. All requests of a workload are submitted at
once and ignore EOS, so each yields exactly the output tokens it asks for. Prompts are drawn anew
for every (workload, repetition): prefixes repeat only where a workload means them to. Lengths never
change, so repetitions are equal work.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BenchmarkRequest:
    """One request: the prompt's token ids, and how many tokens to generate."""

    prompt_token_ids: tuple[int, ...]
    num_output_tokens: int


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests that are submitted together. description: what it measures, on one line."""

    name: str
    description: str
    requests: tuple[BenchmarkRequest, ...]

    @property
    def num_prompt_tokens(self) -> int:
        """Prompt tokens of all requests."""
        return sum(len(request.prompt_token_ids) for request in self.requests)

    @property
    def num_output_tokens(self) -> int:
        """Output tokens of all requests."""
        return sum(request.num_output_tokens for request in self.requests)

    def describe(self) -> dict[str, str | int]:
        """What a report says of it."""
        return {
            "description": self.description,
            "num_requests": len(self.requests),
            "num_prompt_tokens": self.num_prompt_tokens,
            "num_output_tokens": self.num_output_tokens,
        }


class _Draw:
    """Draws prompts for one repetition of one workload."""

    def __init__(self, seed: str, vocab_size: int) -> None:
        self._random = random.Random(seed)  # of a str: the same on every platform
        self._ids = range(vocab_size)

    def tokens(self, count: int) -> tuple[int, ...]:
        return tuple(self._random.choices(self._ids, k=count))


def _decode_batch(draw: _Draw) -> list[BenchmarkRequest]:
    return [BenchmarkRequest(draw.tokens(128), 128) for _ in range(16)]


def _prefill(draw: _Draw) -> list[BenchmarkRequest]:
    return [BenchmarkRequest(draw.tokens(1024), 8) for _ in range(8)]


def _shared_prefix(draw: _Draw) -> list[BenchmarkRequest]:
    shared = draw.tokens(768)
    return [BenchmarkRequest(shared + draw.tokens(32), 32) for _ in range(32)]


def _mixed_lengths(draw: _Draw) -> list[BenchmarkRequest]:
    lengths = random.Random(4)  # apart from the prompts: these stay the same
    pairs = [(lengths.randint(32, 256), lengths.randint(32, 256)) for _ in range(32)]
    return [BenchmarkRequest(draw.tokens(num_in), num_out) for num_in, num_out in pairs]


def _single(draw: _Draw) -> list[BenchmarkRequest]:
    return [BenchmarkRequest(draw.tokens(128), 128)]


_DEFINITIONS: dict[str, tuple[str, Callable[[_Draw], list[BenchmarkRequest]]]] = {
    "W1": ("decode: 16 requests of 128 in, 128 out", _decode_batch),
    "W2": ("prefill: 8 requests of 1024 in, 8 out", _prefill),
    "W3": ("shared prefix: 32 requests of 768 shared + 32 own in, 32 out", _shared_prefix),
    "W4": ("mixed: 32 requests of 32-256 in, 32-256 out", _mixed_lengths),
    "W5": ("latency: 1 request of 128 in, 128 out", _single),
}

WORKLOAD_NAMES = tuple(_DEFINITIONS)


def make_workload(name: str, vocab_size: int, repetition: int) -> Workload:
    """One repetition of a workload; the same arguments always give the same requests.

    Raises:
        KeyError: a name that is not in WORKLOAD_NAMES.
    """
    description, make_requests = _DEFINITIONS[name]
    draw = _Draw(f"{name}/{repetition}", vocab_size)
    return Workload(name, description, tuple(make_requests(draw)))


def workload_names(text: str) -> list[str]:
    """Names given by commas, for argparse."""
    names = text.split(",")
    unknown = [name for name in names if name not in WORKLOAD_NAMES]
    if unknown:
        known = ",".join(WORKLOAD_NAMES)
        raise argparse.ArgumentTypeError(f"unknown: {','.join(unknown)}; known: {known}")
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
