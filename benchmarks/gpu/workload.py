"""nano-vllm's benchmark: 256 requests of 100 to 1,024 prompt and as many output tokens.

Lengths and prompts are drawn as its bench.py draws them, with seed 0, so all engines have the work
for which figures are published. EOS is ignored and the temperature is 0.6. Each repetition has
other prompts of the same lengths: no engine may find a prompt in its prefix cache.
"""

from __future__ import annotations

import random
from typing import Final

from benchmarks.workloads import BenchmarkRequest

TEMPERATURE: Final = 0.6
_MAX_TOKEN_ID: Final = 10000


def nano_vllm_workload(
    vocab_size: int, repetition: int = 0, small: bool = False
) -> list[BenchmarkRequest]:
    """One repetition; repetition 0 has the prompts of bench.py itself."""
    num_requests, shortest, longest = (6, 4, 24) if small else (256, 100, 1024)
    highest = min(_MAX_TOKEN_ID, vocab_size - 1)
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
