"""What a benchmark and the drivers of engines say to each other: one JSON object per line.

A driver runs one engine in the interpreter that has it, and stays up. It prints a line when it is
ready: `versions`, `settings`, and `may_be_stopped`, whether its process group may get SIGSTOP
while others have their turn. Then each line on stdin is a run,
`{"requests": [[[token ids], num_output_tokens], ...], "sampling": {}}`, answered by what
`describe_run` makes. All requests are submitted at once, EOS ignored, with these parameters of
sampling, or at the temperature of `--temperature` if there are none. The driver ends when stdin
does. Only the standard library is imported, for this file runs in the interpreters of all engines.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, TextIO

Requests = list[tuple[list[int], int]]
"""Prompts as token ids, each with the number of tokens to generate."""
Sampling = dict[str, float]
"""Of all requests of a run: temperature, top_k, top_p, min_p; those that are not there are off."""


def driver_parser() -> argparse.ArgumentParser:
    """The flags that drivers of other engines have in common; each heeds those that it can."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--model", required=True, help="folder with config.json")
    parser.add_argument("--random-weights", action="store_true", help="the folder has none")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--max-model-len", type=int, default=2048)
    parser.add_argument("--max-num-seqs", type=int, default=64)
    parser.add_argument("--max-num-batched-tokens", type=int, default=2048)
    parser.add_argument("--memory-share", type=float, default=0.9, help="of a GPU")
    parser.add_argument("--kv-cache-gib", type=int, default=2, help="on a CPU")
    return parser


def claim_stdout() -> TextIO:
    """The stream of our answers; whatever else is printed from here on goes to stderr."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    return answers


def serve(
    answers: TextIO,
    run: Callable[[Requests, Sampling], dict[str, Any]],
    *,
    versions: dict[str, str],
    settings: dict[str, Any],
    may_be_stopped: bool = True,
) -> None:
    """Say that the engine is ready, and run what comes until stdin ends."""
    ready = {"versions": versions, "settings": settings, "may_be_stopped": may_be_stopped}
    with suppress(BrokenPipeError):  # whoever compares has gone
        print(json.dumps(ready), file=answers)
        for line in sys.stdin:
            asked = json.loads(line)
            print(json.dumps(run(asked["requests"], asked["sampling"])), file=answers)


def without_sampling(
    run: Callable[[Requests], dict[str, Any]],
) -> Callable[[Requests, Sampling], dict[str, Any]]:
    """For engines whose driver has nothing but `--temperature`: anything else ends it."""

    def run_plain(requests: Requests, sampling: Sampling) -> dict[str, Any]:
        if sampling:
            raise ValueError(f"this driver cannot sample with {sampling}")
        return run(requests)

    return run_plain


def describe_run(
    wall_s: float,
    ttft_s: Sequence[float],
    tpot_s: Sequence[float],
    token_ids: Sequence[Sequence[int]],
) -> dict[str, Any]:
    """The answer to a run; the sequences have an item per request, in the order of submission.

    wall_s: from the first submission to the last token. ttft_s: from the first submission to a
    request's first token. tpot_s: mean time of each token after it; both are empty where nobody
    looks at single tokens. token_ids: what was generated.
    """
    return {
        "wall_s": wall_s,
        "ttft_s": list(ttft_s),
        "tpot_s": list(tpot_s),
        "num_output_tokens": [len(ids) for ids in token_ids],
        "first_token_ids": [ids[0] if ids else None for ids in token_ids],
    }


class TokenClock:
    """Notes when each request's first and last tokens came, in seconds since `start_s`."""

    def __init__(self, start_s: float, num_requests: int) -> None:
        self._start_s = start_s
        self._first_s: list[float | None] = [None] * num_requests
        self._last_s = [0.0] * num_requests

    def tick(self, index: int, now_s: float) -> None:
        """A request got tokens."""
        self._last_s[index] = now_s - self._start_s
        if self._first_s[index] is None:
            self._first_s[index] = now_s - self._start_s

    def describe_run(self, wall_s: float, token_ids: Sequence[Sequence[int]]) -> dict[str, Any]:
        """The answer to a run."""
        ttft_s = [self._last_s[i] if t is None else t for i, t in enumerate(self._first_s)]
        tpot_s = [
            (last - first) / max(1, len(ids) - 1)
            for first, last, ids in zip(ttft_s, self._last_s, token_ids, strict=True)
        ]
        return describe_run(wall_s, ttft_s, tpot_s, token_ids)
