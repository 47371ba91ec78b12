"""A storm of kills: streams of every kind in a client whose engine is killed again and again.

Each answer is compared with the undisturbed answer to the same request, token for token and letter
for letter; and for each interruption of a stream there are its parts: from the kill until the
client knows, until an engine serves, until the next token.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np

from nanocore.client import (
    AsyncEngineClient,
    RequestOutput,
    SamplingParams,
    StructuredOutputsParams,
)
from nanocore.client.requests.request_stream import RequestStream

PARTS: Final = {
    "gap_ms": "kill to next token",
    "detection_ms": "until the client knows",
    "start_ms": "until an engine serves",
    "recomputation_ms": "until the token",
}
MAX_KILL_DELAY_S: Final = 0.5
POLL_S: Final = 0.005
PROMPT: Final = "Count from 7 to 12."
_SCHEMA: Final = {"type": "array", "items": {"type": "integer"}, "minItems": 30, "maxItems": 60}
Answer = list[tuple[list[int], str, str | None, Any]]
"""Of each sample: token ids, text, finish reason, log probabilities."""


def stream_kinds(num_tokens: int) -> dict[str, SamplingParams]:
    """One request of each kind, of so many tokens unless it stops before."""
    free: dict[str, Any] = {"max_tokens": num_tokens, "ignore_eos": True}
    drawn: dict[str, Any] = {"temperature": 1.2, **free}
    structured = StructuredOutputsParams(json=_SCHEMA)
    return {
        "greedy": SamplingParams(temperature=0, **free),
        "seeded": SamplingParams(seed=1, **drawn),
        "unseeded": SamplingParams(**drawn),
        "n=4": SamplingParams(n=4, seed=2, **drawn),
        "logprobs": SamplingParams(logprobs=3, seed=3, **drawn),
        "penalties": SamplingParams(
            presence_penalty=0.5, frequency_penalty=0.3, repetition_penalty=1.1, seed=4, **drawn
        ),
        "stop strings": SamplingParams(stop=["apple pear", "9 9 9"], seed=5, **drawn),
        "json schema": SamplingParams(
            temperature=1.0, seed=6, max_tokens=num_tokens, structured_outputs=structured
        ),
    }


@dataclass
class Tally:
    """What was seen. times: of each part of a gap one for each stream and kill, in ms."""

    times: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in PARTS})
    num_kills: int = 0
    num_streams: Counter[str] = field(default_factory=Counter)
    num_tokens: int = 0
    num_resumes: int = 0
    num_inexact: int = 0
    faults: Counter[str] = field(default_factory=lambda: Counter(lost=0, repeated=0, different=0))

    def compare(self, kind: str, answer: Answer, expected: Answer) -> None:
        """Count a stream's tokens, and those that are not as they should be."""
        self.num_streams[kind] += 1
        for (ids, *end), (right_ids, *right_end) in zip(answer, expected, strict=True):
            self.num_tokens += len(ids)
            self.faults["lost"] += max(0, len(right_ids) - len(ids))
            self.faults["repeated"] += max(0, len(ids) - len(right_ids))
            self.faults["different"] += sum(a != b for a, b in zip(ids, right_ids, strict=False))
            self.faults["different"] += end != right_end

    def figures(self) -> dict[str, Any]:
        """For the report."""
        times = {
            name: dict(
                zip(
                    ("median", "p90", "max"), np.percentile(ms, [50, 90, 100]).round(1), strict=True
                )
            )
            for name, ms in self.times.items()
            if ms
        }
        return {
            "num_kills": self.num_kills,
            "num_streams": self.num_streams,
            "num_tokens": self.num_tokens,
            "num_resumes": self.num_resumes,
            "num_inexact_resumes": self.num_inexact,
            **{f"tokens_{fault}": count for fault, count in self.faults.items()},
            **times,
        }


class WatchedClient(AsyncEngineClient):
    """Keeps its streams, which know the seed that an engine has drawn for a request."""

    streams: dict[str, RequestStream]

    async def _submit(self, *arguments: Any, **options: Any) -> RequestStream:
        stream = await super()._submit(*arguments, **options)
        self.streams[stream.request_id] = stream
        return stream


class Storm:
    """Streams of one client, and the kills of its engine, at least rest_s apart."""

    def __init__(self, client: WatchedClient, num_tokens: int, rest_s: float, seed: str) -> None:
        self.tally = Tally()
        self._client = client
        client.streams = {}
        self._kinds = stream_kinds(num_tokens)
        self._rest_s = rest_s
        self._rng = random.Random(seed)
        self._kills_s: list[float] = []
        self._last_token_s = dict.fromkeys(self._kinds, 0.0)
        self._moved = asyncio.Event()
        self._answers: list[tuple[str, SamplingParams, Answer]] = []

    async def run(self, num_kills: int) -> Tally:
        """So many kills; then the streams that are open end, and all are asked for again."""
        is_over = asyncio.Event()
        async with asyncio.TaskGroup() as group:
            for kind in self._kinds:
                group.create_task(self._stream(kind, is_over))
            await self._all_move()
            for _ in range(num_kills):
                await self._kill()
            is_over.set()
        quiet: dict[tuple[str, int | None], Answer] = {}
        for kind, params, answer in self._answers:
            if (kind, params.seed) not in quiet:
                quiet[kind, params.seed], _ = await self._answer(kind, params)
            self.tally.compare(kind, answer, quiet[kind, params.seed])
        return self.tally

    async def _kill(self) -> None:
        """Kill the engine at a random time, and wait until all streams move again."""
        await asyncio.sleep(self._rest_s + self._rng.uniform(0, MAX_KILL_DELAY_S))
        pid = engine_pid(self._client.endpoint)
        assert pid is not None
        self._kills_s.append(time.monotonic())
        os.kill(pid, signal.SIGKILL)
        self.tally.num_kills += 1
        while engine_pid(self._client.endpoint) in (None, pid):  # its last words still arrive
            await asyncio.sleep(POLL_S)
        await self._all_move()

    async def _all_move(self) -> None:
        """Until each stream has had a token from now on."""
        since_s = time.monotonic()
        while min(self._last_token_s.values()) <= since_s:
            self._moved.clear()
            await self._moved.wait()

    async def _stream(self, kind: str, is_over: asyncio.Event) -> None:
        """One stream after the other, until it is over."""
        params = self._kinds[kind]
        while not is_over.is_set():
            answer, seed = await self._answer(kind, params)
            self._answers.append((kind, msgspec.structs.replace(params, seed=seed), answer))

    async def _answer(self, kind: str, params: SamplingParams) -> tuple[Answer, int | None]:
        """What a request answers, as its deltas add up, and its seed."""
        deltas = [""] * params.n
        output: RequestOutput | None = None
        async for output in self._client.generate(PROMPT, params):
            for sample in output.outputs:
                deltas[sample.index] += sample.delta
            self._last_token_s[kind] = time.monotonic()
            self._moved.set()
        assert output is not None
        self._note_resumes(output)
        samples = [
            (one.token_ids, deltas[one.index], one.finish_reason, one.logprobs and [*one.logprobs])
            for one in output.outputs
        ]
        return samples, self._client.streams.pop(output.request_id).seed

    def _note_resumes(self, output: RequestOutput) -> None:
        """Times of each interruption, from the kill before it on."""
        for resumed in output.resumes:
            self.tally.num_resumes += 1
            assert resumed.next_s is not None
            self.tally.num_inexact += not resumed.is_exact
            kill_s = max(s for s in self._kills_s if s <= resumed.lost_s)
            for name, seconds in {
                "gap_ms": resumed.next_s - kill_s,
                "detection_ms": resumed.lost_s - kill_s,
                "start_ms": resumed.reached_s - resumed.lost_s,
                "recomputation_ms": resumed.next_s - resumed.reached_s,
            }.items():
                self.tally.times[name].append(seconds * 1e3)


def engine_pid(endpoint: str) -> int | None:
    """Of the engine that serves there, as its lock says; None while that is written."""
    text = Path(endpoint.removeprefix("ipc://")).with_suffix(".lock").read_text()
    return int(text) if text else None
