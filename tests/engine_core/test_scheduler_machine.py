"""The scheduler under anything a client and a worker may do, with up to three steps in flight,
of any rows or, as with pipeline stages, each of another group of rows; and with drafts, of which
the worker accepts some, so that a row has none to several tokens of a step.

Outputs may be structured: a thread fills their masks, which go to the worker as the step loop has
it, and each matcher must see what was delivered, in order, and nothing else.

A failure is shrunk to the shortest trace of add, plan, collect, abort and reset that shows it. The
fake worker recomputes every context from its simulated KV memory.
"""

from __future__ import annotations

from collections import deque
from copy import copy
from typing import Any

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from nanocore.engine_core.grammars.mask_filler import MaskFiller, StepMasks
from nanocore.engine_core.policy.waiting_queue import QUANTUM_TOKENS, WaitingQueue
from nanocore.engine_core.requests.readiness import Prerequisite
from nanocore.engine_core.scheduling.step_plan import StepPlan
from nanocore.kv_cache import FULL, CacheGroup, Capacity
from nanocore.kv_cache.events import AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch
from nanocore.protocol.sampling import EngineSamplingParams
from tests.campaign import examples
from tests.engine_core.fairness_checks import SchedulerFairness
from tests.engine_core.scheduler_checks import check_blocks, check_idle, check_plan, check_rows
from tests.fakes import (
    VOCAB_SIZE,
    Deliveries,
    FakeGrammar,
    FakeMatcher,
    FakeProposer,
    PipelinedExecutor,
    expected_embedding,
    expected_logprobs,
    expected_structured_tokens,
    expected_tokens,
    make_request,
    make_scheduler,
    withhold_some,
)

KV_LOAD, ADAPTER = Prerequisite("kv_load"), Prerequisite("adapter")
BLOCK_SIZE = 4
MAX_MODEL_LEN = 32
STEMS = ([0, 1, 2, 3, 0, 1, 2, 3, 1], [1] * 12, [2, 3], [3], [2] * 18, [0] * 26)
"""With tails of up to 6 tokens: prompts of several chunks, of as many blocks as a pool has, and of
MAX_MODEL_LEN."""


GROUPS = (
    FULL,
    [CacheGroup("full"), CacheGroup("window(5)", 5)],
    [CacheGroup("full", 0, 3), CacheGroup("window(10)", 10)],
    [CacheGroup("full"), CacheGroup("window(1)", 1, 2), CacheGroup("window(13)", 13, 3)],
    [CacheGroup("window(6)", 6)],
    [CacheGroup("window(3)", 3, 2), CacheGroup("window(20)", 20)],
    [CacheGroup("full"), CacheGroup("state", spacing=1)],
    [CacheGroup("latent", 0, 2), CacheGroup("window(7)", 7), CacheGroup("state", spacing=3)],
)
"""Of layers. Windows end within blocks and at their ends; some cover a token, some most prompts.
States are kept at every boundary, or at few.
"""


@st.composite
def limits(draw: st.DrawFn) -> dict[str, Any]:
    max_num_seqs = draw(st.integers(1, 5))
    num_drafts = draw(st.sampled_from([0, 0, 1, 3]))
    groups = draw(st.just(FULL) | st.sampled_from(GROUPS))
    max_num_batched_tokens = draw(st.integers(max_num_seqs, 40))
    memory = Capacity(1, BLOCK_SIZE, groups, max_num_batched_tokens)
    longest = memory.slabs_of(MAX_MODEL_LEN)
    return {
        "num_speculative_tokens": num_drafts,
        "proposer": draw(st.sampled_from([None, FakeProposer])),
        "cache_groups": groups,
        "num_blocks": longest + draw(st.integers(0, 8)),
        "block_size": BLOCK_SIZE,
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": max_num_batched_tokens,
        "max_model_len": MAX_MODEL_LEN,
        "policy": draw(st.sampled_from(["fcfs", "priority"])),
        "long_prefill_token_threshold": draw(st.sampled_from([0, 0, 1, 5, 8, 9])),
        "watermark": draw(st.sampled_from([0.0, 0.0, 0.2])),
        "enable_prefix_caching": draw(st.integers(0, 3).map(bool)),
    }


def content(plan: StepPlan) -> list[object]:
    """All that a plan says, as of now."""
    values = [getattr(plan, name) for name in StepPlan.__slots__]
    return [value.tolist() if isinstance(value, np.ndarray) else copy(value) for value in values]


class SchedulerMachine(RuleBasedStateMachine):
    """One engine's life."""

    @initialize(
        limits=limits(),
        depth=st.sampled_from([1, 1, 2, 2, 3]),
        has_stages=st.booleans(),
        collide=st.booleans(),
        withholds=st.booleans(),
        may_abort=st.booleans(),
        quantum_tokens=st.sampled_from([4, QUANTUM_TOKENS]),
    )
    def start(
        self,
        limits: dict[str, Any],
        depth: int,
        has_stages: bool,
        collide: bool,
        withholds: bool,
        may_abort: bool,
        quantum_tokens: int,
    ) -> None:
        self.num_groups = depth if has_stages else 1
        self.scheduler, executor = make_scheduler(**limits, num_groups=self.num_groups)
        self.scheduler.waiting = WaitingQueue(
            self.scheduler.precedence, limits["policy"] == "priority", quantum_tokens
        )
        self.fairness = SchedulerFairness(self.scheduler, quantum_tokens)
        if withholds:
            executor.withhold = withhold_some
        self.worker = PipelinedExecutor(executor)
        self.filler = MaskFiller(
            VOCAB_SIZE,
            limits["max_num_seqs"] * (1 + limits["num_speculative_tokens"]),
            num_threads=1,
        )
        self.masks = StepMasks(self.scheduler, self.worker, self.filler)
        self.matchers: dict[int, FakeMatcher] = {}
        self.failed: dict[int, str] = {}
        self.depth = depth
        self.may_abort = may_abort  # an abort frees rows and blocks, which hides who lacks them
        self.digest = {"digest": lambda _: b"x" * 16} if collide else {}
        self.deliveries = Deliveries()
        self.expected: dict[int, list[int]] = {}
        self.prompts: dict[int, list[int]] = {}
        self.resumed: dict[int, list[int]] = {}
        self.sampling: dict[int, EngineSamplingParams] = {}
        self.samples: list[range] = []  # handles of each request
        self.plans: deque[list[object]] = deque()
        self.aborted: set[int] = set()
        self.findable: set[tuple[int | None, bytes]] = set()
        self.awaited: list[tuple[int, Prerequisite]] = []
        self.scheduler.kv_cache.subscribe(self.replay)

    def replay(self, batch: KVEventBatch) -> None:
        for event in batch.events:
            match event:
                case BlockStored(block_hashes, group=group):
                    stored = {(group, digest) for digest in block_hashes}
                    assert not self.findable & stored, "stored twice"
                    self.findable |= stored
                case BlockRemoved(block_hashes, group):
                    removed = {(group, digest) for digest in block_hashes}
                    assert removed <= self.findable
                    self.findable -= removed
                case AllBlocksCleared():
                    self.findable.clear()

    @rule(
        stem=st.sampled_from(STEMS),
        tail=st.lists(st.integers(0, 3), max_size=6),
        max_tokens=st.integers(1, 14),
        priority=st.integers(-1, 1),
        salt=st.sampled_from([None, None, "a"]),
        skip_reading=st.integers(0, 5).map(lambda n: n == 0),
        stop_at=st.none() | st.integers(0, 13),
        goes_on=st.integers(0, 3).map(lambda n: n == 0),
        n=st.sampled_from([1, 1, 1, 2, 3, 7]),
        logprobs=st.sampled_from([None, None, 0, 2]),
        prompt_logprobs=st.sampled_from([None, None, None, 0, 1]),
        fails_at=st.sampled_from([None, None, None, -1, 3]),
        num_resumed=st.sampled_from([0, 0, 1, 2, 5, 13]),
        waits=st.sampled_from([(), (), (), (KV_LOAD,), (KV_LOAD, ADAPTER)]),
    )
    def add(
        self,
        stem: list[int],
        tail: list[int],
        max_tokens: int,
        priority: int,
        salt: str | None,
        skip_reading: bool,
        stop_at: int | None,
        goes_on: bool,
        n: int,
        logprobs: int | None,
        prompt_logprobs: int | None,
        fails_at: int | None,
        num_resumed: int,
        waits: tuple[Prerequisite, ...],
    ) -> None:
        """fails_at: None of a plain request; else when the matcher of a structured one fails.

        num_resumed: outputs that it comes with, as far as it has so many, and one sample.
        """
        handle = len(self.expected) + 1
        prompt = stem + tail
        if goes_on and self.expected:  # from where another one ends, whose blocks may be found
            other = (13 * len(tail) + max_tokens) % len(self.expected) + 1
            prompt = (self.prompts[other] + self.expected[other] + [1])[: MAX_MODEL_LEN - 14]
        max_tokens = min(max_tokens, max(MAX_MODEL_LEN - len(prompt), 1))
        expected = expected_tokens if fails_at is None else expected_structured_tokens
        tokens = expected(prompt, max_tokens)
        stops: tuple[int, ...] = ()
        if stop_at is not None and stop_at < max_tokens:
            stops = (tokens[stop_at],)
            tokens = expected(prompt, max_tokens, stops)
        resumed = tokens[:-1][:num_resumed] if n == 1 else []
        request = make_request(
            handle,
            prompt,
            max_tokens,
            block_size=BLOCK_SIZE,
            cache_salt=salt,
            priority=priority,
            skip_reading_prefix_cache=skip_reading,
            client=handle % 3,
            eos=stops if handle % 2 else (),
            stop_token_ids=() if handle % 2 else stops,
            max_model_len=MAX_MODEL_LEN,
            n=n,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            outputs=resumed,
            **self.digest,
        )
        if fails_at is not None:
            request.follow(FakeGrammar(output=resumed))
        for sample in request.samples:
            if isinstance(sample.matcher, FakeMatcher):
                sample.matcher.fails_at = fails_at or 0
                self.matchers[sample.handle] = sample.matcher
            self.expected[sample.handle] = tokens[len(resumed) :]
            self.resumed[sample.handle] = resumed
            self.prompts[sample.handle] = prompt
            self.sampling[sample.handle] = sample.sampling
        self.samples.append(range(handle, handle + n))
        for what in waits:
            request.wait_for(what)
        self.awaited += [(one.handle, what) for one in request.samples for what in waits]
        self.scheduler.add(request)

    @precondition(lambda self: self.awaited)
    @rule(data=st.data())
    def ready(self, data: st.DataObject) -> None:
        """Something comes that a sample waits for, or waited for until it ended."""
        place = data.draw(st.integers(0, len(self.awaited) - 1))
        self.scheduler.ready(*self.awaited.pop(place))
        check_rows(self.scheduler)

    @rule(
        stem=st.sampled_from(STEMS),
        tail=st.lists(st.integers(0, 3), max_size=6),
        pooling=st.sampled_from(["last", "mean"]),
        eos=st.booleans(),
    )
    def add_pooled(self, stem: list[int], tail: list[int], pooling: str, eos: bool) -> None:
        """eos: the token that is sampled beside its embedding would end it as well."""
        handle, prompt = len(self.expected) + 1, stem + tail
        ends = tuple(expected_tokens(prompt, 1)) if eos else ()
        request = make_request(
            handle, prompt, 1, block_size=BLOCK_SIZE, client=handle % 3, eos=ends,
            max_model_len=MAX_MODEL_LEN, pooling=pooling, **self.digest,
        )  # fmt: skip
        self.expected[handle], self.resumed[handle], self.prompts[handle] = [], [], prompt
        self.sampling[handle] = request.sampling
        self.samples.append(range(handle, handle + 1))
        self.scheduler.add(request)

    @property
    def can_plan(self) -> bool:
        needs_group = not self.scheduler.running.may_overlap
        has_group = not needs_group or self.scheduler.next_group() is not None
        return len(self.worker) < self.depth and has_group and not self.masks.is_awaited

    @precondition(lambda self: self.can_plan)
    @rule()
    def plan(self) -> None:
        scheduler = self.scheduler
        plan = scheduler.schedule(scheduler.next_group() or 0)
        check_plan(scheduler, plan)
        self.fairness.planned()
        assert not scheduler.is_stuck
        if (
            len(self.worker) == 0 and self.num_groups == 1
        ):  # with nothing to wait for, every step gets on
            assert plan.num_tokens or scheduler.planned.preempted or not scheduler.num_requests
        self.plans.append(content(scheduler.planned))
        self.masks.begin(plan)
        self.worker.submit(plan)
        self.sample()

    def sample(self) -> None:
        """As the step loop does whenever masks may be known."""
        for request, message in self.masks.sample():
            self.failed[request.handle] = message
            assert self.scheduler.end(request.handle) is request
        if len(self.worker) < 2 or self.num_groups > 1:
            assert not self.masks.is_awaited, "nothing is left that it could wait for"

    @precondition(lambda self: len(self.worker) > 0)
    @rule()
    def collect(self) -> None:
        self.deliveries.take(self.scheduler, self.worker.collect())
        self.sample()
        assert content(self.scheduler.completed.plan) == self.plans.popleft(), "a plan is fixed"
        check_rows(self.scheduler)
        check_blocks(self.scheduler)
        kv_cache = self.scheduler.kv_cache
        kv_cache.publish_events()
        pools = kv_cache.pools
        assert self.findable == {
            (group if len(pools) > 1 else None, block.key[0])
            for group, pool in enumerate(pools)
            for block in pool.blocks
            if block.key
        }

    @precondition(lambda self: self.may_abort and self.expected)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        handle = data.draw(st.integers(1, len(self.expected) + 1))
        request = self.scheduler.abort(handle)
        ended = handle in self.deliveries.finish_reasons
        ended = ended or handle in self.aborted or handle in self.failed
        assert (request is None) == (ended or handle > len(self.expected))
        if request is not None:
            self.aborted.add(handle)
        check_rows(self.scheduler)
        check_blocks(self.scheduler)

    @precondition(lambda self: self.may_abort and self.samples)
    @rule(data=st.data())
    def abort_all_samples(self, data: st.DataObject) -> None:
        for handle in data.draw(st.sampled_from(self.samples)):
            if self.scheduler.abort(handle) is not None:
                self.aborted.add(handle)
        check_rows(self.scheduler)
        check_blocks(self.scheduler)

    @invariant()
    def sessions_are_watched(self) -> None:
        if hasattr(self, "scheduler"):
            self.fairness.changed()

    @invariant()
    def there_is_a_step_for_whoever_may_run(self) -> None:
        if hasattr(self, "scheduler") and not len(self.scheduler.running.in_flight):
            scheduler = self.scheduler
            assert (scheduler.next_group() is not None) == (scheduler.num_requests > 0)

    @rule()
    def reset_prefix_cache(self) -> None:
        kv_cache = self.scheduler.kv_cache
        in_use = kv_cache.num_free_blocks < kv_cache.num_blocks
        assert kv_cache.reset_prefix_cache() is not in_use

    def teardown(self) -> None:
        """Run to the end: everything is delivered, once and in order, and nothing is left."""
        if not hasattr(self, "scheduler"):
            return
        try:
            self.run_to_the_end()
        finally:
            self.filler.close()

    def run_to_the_end(self) -> None:
        for handle, what in self.awaited:
            self.scheduler.ready(handle, what)
        for _ in range(3000):
            while self.can_plan:
                self.plan()
            if len(self.worker):
                self.collect()
            if not self.scheduler.num_requests:
                break
        else:
            raise AssertionError("the requests do not end")
        while len(self.worker):
            self.collect()
        for handle, expected in self.expected.items():
            got = self.deliveries.tokens.get(handle, [])
            if handle in self.matchers:
                self.check_matcher(handle, got)
            if handle in self.failed:
                num_left = self.matchers[handle].fails_at - len(self.resumed[handle])
                assert got == expected[:num_left]
                assert handle not in self.deliveries.finish_reasons
                assert "too complex" in self.failed[handle]
            elif handle in self.aborted:
                assert got == expected[: len(got)]
                assert handle not in self.deliveries.finish_reasons
            else:
                assert got == expected
                assert handle in self.deliveries.finish_reasons
            self.check_logprobs(handle, got)
            self.check_embedding(handle)
            assert bool(got) <= (handle in self.deliveries.num_cached), "a token before the start"
            assert self.deliveries.num_cached.get(handle, 0) <= len(self.prompts[handle])
        check_idle(self.scheduler)

    def check_matcher(self, handle: int, got: list[int]) -> None:
        """It saw what was delivered, and each of these tokens was sampled under a mask."""
        matcher, resumed = self.matchers[handle], self.resumed[handle]
        assert matcher.output == resumed + got
        assert set(range(len(resumed), len(resumed + got))) <= matcher.num_fills.keys()

    def check_embedding(self, handle: int) -> None:
        """With the end of who asked for one."""
        is_pooled = self.sampling[handle].pooling is not None
        has_ended = self.deliveries.finish_reasons.get(handle) == "stop"
        expected = expected_embedding(self.prompts[handle]) if is_pooled and has_ended else None
        assert self.deliveries.embeddings.get(handle) == expected
        assert not is_pooled or self.deliveries.finish_reasons.get(handle) in (None, "stop")

    def check_logprobs(self, handle: int, got: list[int]) -> None:
        """Each token's with the token, and each prompt token's once, before the first token."""
        sampling, prompt = self.sampling[handle], self.prompts[handle]
        said = self.deliveries.logprobs.get(handle, [])
        num = sampling.logprobs
        context = prompt + self.resumed[handle]
        assert said == ([] if num is None else expected_logprobs(context, got, num))
        said = self.deliveries.prompt_logprobs.get(handle, [])
        num = sampling.prompt_logprobs
        expected = [] if num is None else expected_logprobs(prompt[:1], prompt[1:], num)
        assert said == expected[: len(said)]
        if got:
            assert said == expected


SchedulerMachine.TestCase.settings = settings(
    max_examples=examples(120), stateful_step_count=40, deadline=None
)
TestSchedulerMachine = SchedulerMachine.TestCase
