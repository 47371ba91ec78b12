"""Plans written beforehand, and what runners on ranks and devices say beside tokens.

Each request has a row and blocks of its own and begins a step after the one before it, so that
prompts, in chunks of any size, and decodes share steps. What is sampled changes no plan: stages
that do not sample are told what `outputs` has.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from nanocore.protocol.sampling import EngineSamplingParams
from nanocore.worker.communication.communicator import Communicator
from nanocore.worker.plan import ModelRunnerOutput, NewRow, RowLogprobs, SchedulerOutput
from nanocore.worker.step.model_runner import ModelRunner
from nanocore.worker.step.pending_output import PendingOutput
from tests.fake_device import FakeStream
from tests.step_plans import int32, make_plan, make_row
from tests.worker.device_engine import DeviceKernels
from tests.worker.ranks import run_ranks
from tests.worker.running import BLOCK_SIZE, MAX_NUM_SEQS, NUM_BLOCKS, World, make_runner

Entry = tuple[int, list[int], list[float]]
"""Of a token: its rank, then its candidates and their log probabilities."""


@dataclass(frozen=True)
class Asking:
    """A request. num_tokens: that it samples."""

    prompt: list[int]
    sampling: EngineSamplingParams
    num_tokens: int = 4


@dataclass
class Said:
    """By row."""

    tokens: dict[int, list[int]] = field(default_factory=dict)
    logprobs: dict[int, list[Entry]] = field(default_factory=dict)
    prompt_logprobs: dict[int, list[Entry]] = field(default_factory=dict)
    embeddings: dict[int, bytes] = field(default_factory=dict)

    def take(self, output: ModelRunnerOutput) -> None:
        rows, tokens = (np.frombuffer(c, "<i4").tolist() for c in (output.rows, output.token_ids))
        for row, token in zip(rows, tokens, strict=True):
            self.tokens.setdefault(row, []).append(token)
        for to, said in (
            (self.logprobs, output.logprobs),
            (self.prompt_logprobs, output.prompt_logprobs),
        ):
            for row, entry in entries(said):
                to.setdefault(row, []).append(entry)
        pooled_rows = np.frombuffer(output.pooled_rows, "<i4").tolist()
        size = len(output.pooled) // max(len(pooled_rows), 1)
        for i, row in enumerate(pooled_rows):
            assert row not in self.embeddings
            self.embeddings[row] = output.pooled[i * size : (i + 1) * size]


def entries(said: RowLogprobs | None) -> list[tuple[int, Entry]]:
    if said is None:
        return []
    columns = said.rows, said.ranks, said.counts, said.token_ids
    rows, ranks, counts, token_ids = (np.frombuffer(column, "<i4") for column in columns)
    logprobs = np.frombuffer(said.logprobs, "<f4")
    assert len(rows) == len(ranks) == len(counts) > 0
    assert len(token_ids) == len(logprobs) == counts.sum()
    ends = np.cumsum(counts)
    return [
        (row, (rank, token_ids[start:end].tolist(), logprobs[start:end].tolist()))
        for row, rank, start, end in zip(
            rows.tolist(), ranks.tolist(), ends - counts, ends, strict=True
        )
    ]


def new_row(
    row: int,
    asking: Asking,
    output: Sequence[int] = (),
    num_computed: int = 0,
    num_prompt_logprobs: int = 0,
    num_cache_groups: int = 1,
) -> NewRow:
    num_blocks = -(-(len(asking.prompt) + asking.num_tokens) // BLOCK_SIZE)
    first_blocks = [1 + 4 * row + NUM_BLOCKS * group for group in range(num_cache_groups)]
    assert num_blocks <= 4
    return make_row(
        row,
        asking.prompt,
        asking.sampling,
        output=output,
        num_computed=num_computed,
        blocks=[first + i for first in first_blocks for i in range(num_blocks)],
        seed=row,
        num_prompt_logprobs=num_prompt_logprobs,
    )


def write_plans(
    requests: Sequence[Asking],
    chunk: int,
    outputs: dict[int, list[int]] | None = None,
    num_groups: int = 1,
    num_cache_groups: int = 1,
) -> list[SchedulerOutput]:
    known: dict[int, int] = {}
    computed: dict[int, int] = {}
    ends = [len(request.prompt) + request.num_tokens for request in requests]
    plans: list[SchedulerOutput] = []
    sampled: list[tuple[int, int]] = []
    while len(known) < len(requests) or any(known[r] < ends[r] for r in known):
        group = len(plans) % num_groups
        removed = [row for row in computed if known[row] == ends[row]]
        for row in removed:
            del computed[row]
        if not plans:
            removed = [*range(MAX_NUM_SEQS)]  # whoever had them
        added = []
        row = len(plans)
        if row < len(requests):
            added.append(new_row(row, requests[row], num_cache_groups=num_cache_groups))
            known[row], computed[row] = len(requests[row].prompt), 0
        counts = {
            r: min(chunk, known[r] - computed[r]) for r in computed if r % num_groups == group
        }
        chunks = {r: count for r, count in counts.items() if count != 1}
        plans.append(
            make_plan(
                added,
                chunks,
                removed=removed,
                step=len(plans) + 1,
                group=group,
                sampled_rows=int32(r for r, _ in sampled),
                sampled_token_ids=int32(token for _, token in sampled),
                num_tokens=sum(counts.values()),
            )
        )
        sampled = []
        for r, count in counts.items():
            computed[r] += count
            if computed[r] == known[r]:
                if outputs is not None:
                    sampled.append((r, outputs[r][known[r] - len(requests[r].prompt)]))
                known[r] += 1
    return plans


def run(runner: ModelRunner, plans: Sequence[SchedulerOutput], depth: int = 1) -> Said:
    said = Said()
    in_flight: deque[PendingOutput] = deque()
    for plan in plans:
        in_flight.append(runner.begin(plan))
        if len(in_flight) == depth:
            said.take(in_flight.popleft().wait())
    for pending in in_flight:
        said.take(pending.wait())
    return said


def run_ranks_of(
    folder: Path,
    plans: Sequence[SchedulerOutput],
    tp_size: int,
    pp_size: int,
    backend: str = "cpu",
    *,
    on_devices: bool = False,
) -> list[Said]:
    """What each rank of an engine says."""
    world = World(tp_size, pp_size)

    def of_rank(rank: Communicator) -> Said:
        placement, links = world.join(rank.rank, torch.float32)
        kernels, stream = None, None
        if on_devices:
            kernels, stream = DeviceKernels(), FakeStream(1)
        runner = make_runner(
            folder, placement, links, backend=backend, kernels=kernels, stream=stream
        )
        return run(runner, plans)

    return run_ranks(tp_size * pp_size, of_rank)
