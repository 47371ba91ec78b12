"""Random plans of rows with drafts, several in flight, and what a runner makes of them.

A request's true tokens are those that it gets alone and without drafts. The proposer knows them,
and is wrong where a draw says so: so it is known how many tokens each step should deliver.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nanocore.kernels.sampling import TokenPlaces
from nanocore.protocol.sampling import EngineSamplingParams
from nanocore.worker.memory.kv_memory import KVSpec
from nanocore.worker.plan import ModelRunnerOutput, NewRow, SchedulerOutput, TokenMasks
from nanocore.worker.step.batch_step import BatchStep
from nanocore.worker.step.drafts import Proposal
from nanocore.worker.step.model_runner import ModelRunner
from nanocore.worker.step.pending_output import PendingOutput
from tests.step_plans import int32, make_plan, make_row
from tests.worker.planned_rows import Entry, entries

BLOCK_SIZE = 4
NUM_ROWS = 4
BLOCKS_OF_A_ROW = 20
MAX_DRAFTS = 3


@dataclass(frozen=True)
class Wish:
    """A request; the first token of its prompt is its number. allowed: of its output so far."""

    prompt: list[int]
    num_tokens: int
    sampling: EngineSamplingParams
    allowed: Callable[[list[int]], NDArray[np.bool_]] | None = None


class Bystander:
    """Implements what of `WorkerProposer` a proposer without layers has no use for."""

    cache_specs: Sequence[KVSpec] = ()

    def nothing(self, *_: object) -> None: ...

    allocate = release_kv_memory = capture = apply = begin_row = settle = nothing


class TruthTeller(Bystander):
    """Implements `WorkerProposer`: true tokens, but for those that are drawn to be wrong.

    truth: the outputs of all requests. wrong: out of so many places.
    """

    def __init__(self, wishes: list[Wish], wrong: float, seed: int) -> None:
        self.wishes, self.truth = wishes, list[list[int]]()
        self.is_wrong = np.random.default_rng(seed).random((len(wishes), 100)) < wrong

    def guess(self, request: int, position: int) -> int:
        index = position - len(self.wishes[request].prompt)
        truth = self.truth[request]
        token = truth[index] if index < len(truth) else 0
        return (token + 1) % 300 if self.is_wrong[request, position] else token

    def propose(self, step: BatchStep) -> Proposal:
        return Proposal({}, self.of_places)

    def of_places(
        self, fields: Mapping[str, Tensor], places: TokenPlaces, is_certain: bool
    ) -> Tensor:
        requests = places.token_table[places.rows_R, 0].tolist()
        drafts = map(self.guess, requests, places.positions_R.tolist())
        return torch.tensor([*drafts], dtype=torch.int32)


@dataclass
class Row:
    """A request that has a row. known, computed: tokens, as many as there may be."""

    request: int
    known: int
    computed: int
    num_blocks: int


@dataclass
class Heard:
    """A request so far."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[Entry] = field(default_factory=list)
    prompt_logprobs: list[Entry] = field(default_factory=list)


@dataclass
class Driver:
    """Plans steps at random, and takes their results as an engine would.

    seen: how often what happened that this is about. aborted: requests whose clients left.
    """

    runner: ModelRunner
    wishes: list[Wish]
    rng: np.random.Generator
    depth: int
    max_drafts: int = 0
    proposer: TruthTeller | None = None
    is_rough: bool = True
    rows: dict[int, Row] = field(default_factory=dict)
    heard: list[Heard] = field(default_factory=list)
    removed: list[int] = field(default_factory=list)
    seen: Counter[str] = field(default_factory=Counter)
    aborted: set[int] = field(default_factory=set)
    step: int = 0

    def run(self, requests: list[int]) -> list[Heard]:
        """What each request hears; nothing by those that are not run."""
        self.heard = [Heard() for _ in self.wishes]
        self.waiting = deque(requests)
        in_flight: deque[tuple[PendingOutput, dict[int, tuple[Row, int]]]] = deque()
        while self.waiting or self.rows or in_flight:
            while len(in_flight) < self.depth and (self.waiting or self.rows or self.removed):
                if in_flight and in_flight[-1][0].awaits_masks:
                    break
                planned = self.plan()
                if planned is None:
                    break
                plan, taking_part = planned
                in_flight.append((self.runner.begin(plan), taking_part))
                if len(in_flight) == 1:
                    self.tell_masks(*in_flight[0])
            if not in_flight:
                continue
            pending, taking_part = in_flight.popleft()
            self.take(pending.wait(), taking_part)
            self.seen["in flight"] += len(in_flight)
            if len(in_flight) == 1:
                self.tell_masks(*in_flight[0])
        return self.heard

    def plan(self) -> tuple[SchedulerOutput, dict[int, tuple[Row, int]]] | None:
        """A step, and the rows in it with their numbers of sample slots."""
        removed, self.removed = self.removed, []
        for row in [*self.rows]:
            if self.is_rough and self.rng.random() < 0.04:
                request = self.rows.pop(row).request
                removed.append(row)
                if self.rng.random() < 0.2:
                    self.aborted.add(request)
                else:
                    self.waiting.append(request)
                    self.seen["preempted"] += 1
        free = [row for row in range(NUM_ROWS) if row not in self.rows and self.rng.random() < 0.7]
        added = [self.add(row, self.waiting.popleft()) for row in free[: len(self.waiting)]]
        counts, taking_part, blocks = {}, {}, []
        planned_ids: dict[int, list[int]] = {}
        for number, row in self.rows.items():
            count, drafts = self.draw_count(row)
            if count != 1:
                counts[number] = count
            row.computed += count
            num_slots = 1 + drafts if row.computed >= row.known and count else 0
            if self.proposer is not None:
                places = range(row.known, row.known + drafts)
                planned_ids[number] = [self.proposer.guess(row.request, one) for one in places]
            row.known += num_slots
            if count:
                taking_part[number] = row, num_slots
            needed = -(-row.computed // BLOCK_SIZE)
            blocks += [(number, block) for block in range(row.num_blocks, needed)]
            row.num_blocks = max(row.num_blocks, needed)
        self.step += 1
        total = sum(counts.values()) + len(self.rows) - len(counts)
        if total == 0:
            if added or removed or blocks:
                # The next one takes it.
                assert not blocks
                self.removed = removed
                for new in added:
                    self.waiting.appendleft(self.rows.pop(new.row).request)
            return None
        plan = make_plan(
            added, counts, removed=removed, step=self.step, num_tokens=total,
            block_rows=int32(row for row, _ in blocks),
            block_ids=self.block_ids([1 + row * BLOCKS_OF_A_ROW + n for row, n in blocks]),
            awaits_masks=any(self.wishes[row.request].allowed for row in self.rows.values()),
        )  # fmt: skip
        # With steps in flight it is not known which places a row's drafts have.
        if self.depth == 1 and self.rng.random() < 0.5:
            drafts_D = [one for number in sorted(planned_ids) for one in planned_ids[number]]
            plan = msgspec.structs.replace(plan, draft_token_ids=int32(drafts_D))
            self.seen["planned drafts"] += bool(drafts_D)
        return plan, taking_part

    def add(self, number: int, request: int) -> NewRow:
        wish, heard = self.wishes[request], self.heard[request]
        length = len(wish.prompt) + len(heard.tokens)
        held = 1 + int(self.rng.integers(0, -(-length // BLOCK_SIZE)))
        self.rows[number] = Row(request, length, 0, held)
        first = 1 + number * BLOCKS_OF_A_ROW
        row = make_row(
            number, wish.prompt, wish.sampling, output=heard.tokens,
            seed=request, num_prompt_logprobs=len(heard.prompt_logprobs),
        )  # fmt: skip
        block_ids = self.block_ids(range(first, first + held))
        return msgspec.structs.replace(row, block_ids=block_ids)

    def block_ids(self, blocks: Sequence[int]) -> bytes:
        """Of each group of layers as many, in slabs of its own."""
        assert self.runner.kv_memory is not None
        pools = self.runner.kv_memory.blocks
        starts = [number * len(pool) // len(pools) for number, pool in enumerate(pools)]
        return int32(start + block for start in starts for block in blocks)

    def draw_count(self, row: Row) -> tuple[int, int]:
        """Tokens that a row computes, and how many of them are drafts."""
        wish, left = self.wishes[row.request], row.known - row.computed
        room = len(wish.prompt) + wish.num_tokens - row.known
        if room == 0 or (self.is_rough and self.rng.random() < 0.15):
            return 0, 0
        if left > 1:
            count = int(self.rng.integers(1, left + 1))
            if count < left:
                return count, 0
        else:
            count = left
        drafts = int(self.rng.integers(0, 1 + min(self.max_drafts, room - 1)))
        self.seen[f"{drafts} drafts"] += 1
        return count + drafts, drafts

    def tell_masks(self, pending: PendingOutput, taking_part: dict[int, tuple[Row, int]]) -> None:
        if not pending.awaits_masks:
            return
        rows, words = [], []
        for number, (row, num_slots) in taking_part.items():
            wish, heard = self.wishes[row.request], self.heard[row.request]
            if wish.allowed is None or self.rows.get(number) is not row:
                continue
            output = [*heard.tokens]
            for _ in range(num_slots):
                mask = wish.allowed(output)
                rows.append(number)
                words.append(np.packbits(mask, bitorder="little").tobytes())
                if self.proposer is not None:
                    position = len(wish.prompt) + len(output)
                    output.append(self.proposer.guess(row.request, position))
        order = self.rng.permutation(len({*rows}))
        by_row = [[i for i, r in enumerate(rows) if r == number] for number in dict.fromkeys(rows)]
        places = [i for place in order for i in by_row[place]]
        pending.sample(
            TokenMasks(
                step=pending.number,
                rows=int32(rows[i] for i in places),
                words=b"".join(words[i] for i in places),
            )
        )

    def take(self, output: ModelRunnerOutput, taking_part: dict[int, tuple[Row, int]]) -> None:
        rows, tokens = (np.frombuffer(c, "<i4").tolist() for c in (output.rows, output.token_ids))
        counts = np.frombuffer(output.counts, "<i4").tolist() or [1] * len(rows)
        assert {*rows} == {number for number, (_, slots) in taking_part.items() if slots}
        assert len(tokens) == sum(counts)
        logprobs: dict[int, list[Entry]] = {}
        for number, entry in entries(output.logprobs):
            logprobs.setdefault(number, []).append(entry)
        for number, entry in entries(output.prompt_logprobs):  # whether or not it samples
            row, _ = taking_part[number]
            if self.rows.get(number) is row:
                self.heard[row.request].prompt_logprobs.append(entry)
        for number, count in zip(rows, counts, strict=True):
            row, num_slots = taking_part[number]
            own, tokens = tokens[:count], tokens[count:]
            assert 1 <= count <= num_slots
            if num_slots > 1:
                kind = {1: "none right", num_slots: "all right"}.get(count, "some right")
                self.seen[kind] += 1
            if self.rows.get(number) is not row:
                self.seen["late"] += 1
                continue  # it lost its row meanwhile: these come again
            row.known -= num_slots - count
            row.computed -= num_slots - count
            heard, wish = self.heard[row.request], self.wishes[row.request]
            heard.tokens += own
            heard.logprobs += logprobs.get(number, [])
            if wish.sampling.logprobs is not None:
                assert len(logprobs[number]) == count
            if len(heard.tokens) >= wish.num_tokens:
                del heard.tokens[wish.num_tokens :], heard.logprobs[wish.num_tokens :]
                del self.rows[number]
                self.removed.append(number)
