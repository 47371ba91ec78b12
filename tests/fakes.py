"""Fakes that tests of every room share.

`FakeExecutor` is a worker whose "model" is a hash of the whole context. It keeps a simulated KV
memory and refuses to compute from slots that do not hold exactly the context's tokens, so a wrong
block, a stale row or a hit on the wrong prefix fails at once, and expected outputs are known
without any engine (`expected_tokens`).
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import xxhash

from nanocore.engine_core.config import SchedulerConfig
from nanocore.engine_core.scheduling.request import Request
from nanocore.engine_core.scheduling.scheduler import Scheduler
from nanocore.kv_cache import KeyChain, KVCacheManager
from nanocore.kv_cache.block_key import DigestFunction
from nanocore.protocol.sampling import EngineSamplingParams
from nanocore.worker.plan import ModelRunnerOutput, SchedulerOutput

VOCAB_SIZE = 50


def context_hash(token_ids: list[int]) -> int:
    """What the fake model knows of a context."""
    return zlib.crc32(np.array(token_ids, "<i4").tobytes())


def next_token(token_ids: list[int]) -> int:
    """The fake model's greedy choice after this context."""
    return context_hash(token_ids) % VOCAB_SIZE


def expected_tokens(
    prompt: list[int], max_tokens: int, stop_ids: tuple[int, ...] = ()
) -> list[int]:
    """What a request must deliver, whatever else runs."""
    context = list(prompt)
    while len(context) < len(prompt) + max_tokens:
        context.append(next_token(context))
        if context[-1] in stop_ids:
            break
    return context[len(prompt) :]


@dataclass
class _Row:
    """One tenancy of a row: a resumed request is another one."""

    token_ids: list[int]
    num_computed: int
    block_ids: list[int]
    num_known: int
    """Tokens that a pipeline stage which does not sample has been told of."""


@dataclass
class FakeExecutor:
    """Executes plans on a simulated KV memory, one Python object per row.

    block_size, num_blocks: the pool's, to check what the plan refers to. checks_kv: False leaves
    out the simulated memory, whose cost grows with the square of the context. sample: the model's
    choice after a context.
    """

    block_size: int
    num_blocks: int
    checks_kv: bool = True
    sample: Callable[[list[int]], int] = next_token
    rows: dict[int, _Row] = field(default_factory=dict)
    slots: dict[tuple[int, int], int] = field(default_factory=dict)
    num_groups: int = 1
    num_tokens: int = 0
    written: dict[int, _Row] = field(default_factory=dict)
    """Blocks that the last step wrote, and for whom."""

    def execute(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        """Apply the plan's differences, write all KV, then read it and sample."""
        plan = msgspec.msgpack.decode(msgspec.msgpack.encode(plan), type=SchedulerOutput)
        self._apply(plan)
        counts = {row: int(row % self.num_groups == plan.group) for row in self.rows}
        exceptions = dict(zip(_ints(plan.chunk_rows), _ints(plan.chunk_counts), strict=True))
        assert exceptions.keys() <= self.rows.keys(), "a chunk of a row nobody holds"
        counts |= exceptions
        assert sum(counts.values()) == plan.num_tokens
        self.written = {}
        for row, count in counts.items():
            self._write(self.rows[row], count)
        sampled = {row: self._sample(self.rows[row]) for row, count in counts.items() if count}
        sampled = {row: token for row, token in sampled.items() if token is not None}
        self.num_tokens += plan.num_tokens
        return ModelRunnerOutput(
            rows=np.array(list(sampled), "<i4").tobytes(),
            token_ids=np.array(list(sampled.values()), "<i4").tobytes(),
        )

    def _apply(self, plan: SchedulerOutput) -> None:
        sampled = zip(_ints(plan.sampled_rows), _ints(plan.sampled_token_ids), strict=True)
        for index, token_id in sampled:
            row = self.rows[index]
            assert row.token_ids[row.num_known] == token_id
            row.num_known += 1
        for index in _ints(plan.removed_rows):
            del self.rows[index]
        for new in plan.added:
            assert new.row not in self.rows, f"row {new.row} is taken"
            self.rows[new.row] = _Row(
                _ints(new.token_ids), new.num_computed_tokens, _ints(new.block_ids),
                num_known=len(_ints(new.token_ids)),
            )  # fmt: skip
        for index, block_id in zip(_ints(plan.block_rows), _ints(plan.block_ids), strict=True):
            self.rows[index].block_ids.append(block_id)

    def _slot(self, row: _Row, position: int) -> tuple[int, int]:
        block_id = row.block_ids[position // self.block_size]
        assert 0 <= block_id < self.num_blocks
        return block_id, position % self.block_size

    def _write(self, row: _Row, count: int) -> None:
        assert row.num_computed + count <= len(row.token_ids), "computes a token nobody knows"
        if self.num_groups > 1:
            assert row.num_computed + count <= row.num_known, "the first stage does not know it"
        for position in range(row.num_computed, row.num_computed + count * self.checks_kv):
            slot = self._slot(row, position)
            self.slots[slot] = context_hash(row.token_ids[: position + 1])
            assert self.written.setdefault(slot[0], row) is row, "two rows write to one block"
        row.num_computed += count

    def _sample(self, row: _Row) -> int | None:
        for position in range(row.num_computed * self.checks_kv):
            held = self.slots.get(self._slot(row, position))
            assert held == context_hash(row.token_ids[: position + 1]), (
                f"KV of position {position} is not this context's"
            )
        if row.num_computed < len(row.token_ids):
            return None
        token = self.sample(row.token_ids)
        row.token_ids.append(token)
        return token


class PipelinedExecutor:
    """A worker with several steps in flight, whose results come late, in order.

    A step in flight may write its blocks at any time until it is collected, so no other request may
    be given them meanwhile.
    """

    def __init__(self, executor: FakeExecutor) -> None:
        self._executor = executor
        self._in_flight: deque[tuple[ModelRunnerOutput, dict[int, _Row]]] = deque()

    def __len__(self) -> int:
        return len(self._in_flight)

    @property
    def num_tokens(self) -> int:
        """Tokens computed so far."""
        return self._executor.num_tokens

    def submit(self, plan: SchedulerOutput) -> None:
        """Start a step."""
        result = self._executor.execute(plan)
        for _, written in self._in_flight:
            for block_id, row in self._executor.written.items():
                assert written.get(block_id, row) is row, (
                    f"block {block_id} is written by two requests in steps that are in flight"
                )
        self._in_flight.append((result, self._executor.written))

    def collect(self) -> ModelRunnerOutput:
        """Wait for the oldest step."""
        return self._in_flight.popleft()[0]


def make_scheduler(
    *,
    num_blocks: int = 64,
    block_size: int = 4,
    max_num_seqs: int = 8,
    max_num_batched_tokens: int = 64,
    max_model_len: int = 128,
    enable_prefix_caching: bool = True,
    **settings: Any,
) -> tuple[Scheduler, FakeExecutor]:
    """A scheduler and the fake worker that checks it. settings: more of SchedulerConfig's."""
    config = SchedulerConfig(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=max_model_len,
        **settings,
    )
    kv_cache = KVCacheManager(num_blocks, block_size, enable_prefix_caching)
    executor = FakeExecutor(block_size, num_blocks, num_groups=config.num_groups)
    return Scheduler(config, kv_cache), executor


def make_request(
    handle: int,
    prompt: list[int],
    max_tokens: int,
    *,
    block_size: int = 4,
    client: int = 1,
    cache_salt: str | None = None,
    eos: tuple[int, ...] = (),
    stop_token_ids: tuple[int, ...] = (),
    max_model_len: int = 128,
    priority: int = 0,
    skip_reading_prefix_cache: bool = False,
    digest: DigestFunction = xxhash.xxh3_128_digest,
) -> Request:
    """A request as admission would build it; its id is "r" and the handle."""
    key_chain = KeyChain(block_size, {"cache_salt": cache_salt}, digest)
    key_chain.extend(np.array(prompt, "<i4").tobytes())
    return Request(
        handle=handle,
        request_id=f"r{handle}",
        client=client,
        token_ids=np.array(prompt, "<i4"),
        max_num_tokens=min(len(prompt) + max_tokens, max_model_len),
        sampling=EngineSamplingParams(
            max_tokens=max_tokens,
            stop_token_ids=list(stop_token_ids),
            skip_reading_prefix_cache=skip_reading_prefix_cache,
        ),
        seed=handle,
        eos_token_ids=eos,
        key_chain=key_chain,
        priority=priority,
    )


class Deliveries:
    """Collects what clients would receive from `Scheduler.update`."""

    def __init__(self) -> None:
        self.tokens: dict[int, list[int]] = {}
        self.finish_reasons: dict[int, str] = {}
        self.messages: dict[int, str] = {}
        self.num_cached: dict[int, int] = {}

    def step(self, scheduler: Scheduler, executor: FakeExecutor) -> SchedulerOutput:
        """Run one whole step and take in its output; returns the plan."""
        plan = scheduler.schedule()
        self.take(scheduler, executor.execute(plan))
        return plan

    def take(self, scheduler: Scheduler, result: ModelRunnerOutput) -> None:
        """Take in a step's result."""
        for output in scheduler.update(result):
            for handle, token in zip(
                output.handles.tolist(), output.token_ids.tolist(), strict=True
            ):
                assert handle not in self.finish_reasons, "a token after the end"
                self.tokens.setdefault(handle, []).append(token)
            for event in output.events:
                if event.num_cached_tokens is not None:
                    assert event.handle not in self.num_cached, "a request starts once"
                    self.num_cached[event.handle] = event.num_cached_tokens
                if event.finish_reason is not None:
                    assert event.handle not in self.finish_reasons, "a request ends once"
                    self.finish_reasons[event.handle] = event.finish_reason
                if event.message is not None:
                    self.messages[event.handle] = event.message


def _ints(column: bytes) -> list[int]:
    return np.frombuffer(column, "<i4").tolist()
