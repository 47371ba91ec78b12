"""Which prefixes models with states go on from, small states and large ones, in known workloads.

Prompts of other engines' bug reports, in which their hits fall to none, and sessions of agents and
chats. Counts are exact: nothing here depends on time.
"""

from __future__ import annotations

import random

import pytest

from nanocore.kv_cache import CacheGroup
from tests.fakes import Deliveries, make_request, make_scheduler

BLOCK = 16
SMALL = [CacheGroup("full"), CacheGroup("state", spacing=1)]
LARGE = [CacheGroup("full", 0, 4), CacheGroup("state", spacing=32)]
"""A slab has four blocks of tokens or one state; the first checkpoint is at 512 tokens."""
GROUPS = pytest.mark.parametrize("groups", [SMALL, LARGE], ids=["small", "large"])


class Engine:
    """A scheduler with room for everything, over the fake worker without simulated memory."""

    def __init__(self, groups: list[CacheGroup], num_slabs: int = 8000, budget: int = 2048) -> None:
        self.scheduler, self.executor = make_scheduler(
            num_blocks=num_slabs, block_size=BLOCK, max_num_batched_tokens=budget,
            max_model_len=20_000, cache_groups=groups, max_num_seqs=16,
        )  # fmt: skip
        self.executor.checks_kv = False
        self.deliveries = Deliveries()
        self.num_requests = 0

    def add(self, prompt: list[int], max_tokens: int = 1, **sampling: int) -> int:
        handle, self.num_requests = self.num_requests, self.num_requests + sampling.get("n", 1)
        request = make_request(
            handle, prompt, max_tokens, block_size=BLOCK, max_model_len=20_000, **sampling
        )
        self.scheduler.add(request)
        return handle

    def run(self) -> None:
        while self.scheduler.num_requests:
            self.deliveries.step(self.scheduler, self.executor)

    def hit(self, prompt: list[int], max_tokens: int = 1) -> int:
        """Serve a request alone; returns its tokens that were cached."""
        handle = self.add(prompt, max_tokens)
        self.run()
        return self.deliveries.num_cached[handle]


def whole_blocks(prompt: list[int]) -> int:
    """Tokens of the longest hit that there can be."""
    return (len(prompt) - 1) // BLOCK * BLOCK


def text(seed: int, num_tokens: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(50) for _ in range(num_tokens)]


@GROUPS
@pytest.mark.parametrize(
    ("num_shared", "num_own", "second"),
    [
        (1600, 600, 1024),  # vllm#45238, where hits are 52 of 64
        (1500, 700, 1024),  # and none of 64
        (560, 1386, 512),  # vllm#46384
        (908, 120, 512),  # vllm#53749
    ],
)
def test_a_shared_prefix_is_hit_up_to_its_last_block_from_the_third_request_on(
    num_shared: int, num_own: int, second: int, groups: list[CacheGroup]
) -> None:
    engine, shared = Engine(groups), text(0, num_shared)
    hits = [engine.hit(shared + [i] * 2 + text(i, num_own)) for i in range(64)]
    last = num_shared // BLOCK * BLOCK
    # Where the second one parts from the first, a large state is kept from then on.
    assert hits == [0, second if groups is LARGE else last] + [last] * 62
    lost = engine.scheduler.kv_cache.stats.lost_tokens["state"]
    assert lost == (last - second if groups is LARGE else 0)


@GROUPS
def test_each_turn_of_an_agent_computes_what_is_new_and_less_than_a_block_more(
    groups: list[CacheGroup],
) -> None:
    engine, prompt = Engine(groups), text(1, 3000)
    for turn in range(12):
        handle = engine.add(prompt, 90)
        engine.run()
        prompt = [*prompt, *engine.deliveries.tokens[handle]]  # its last token was not computed
        num_known = len(prompt) - 1
        prompt = [*prompt, *text(100 + turn, 70)]
        num_cached = engine.hit(prompt)
        assert num_known - BLOCK < num_cached <= num_known


@GROUPS
def test_a_chat_whose_template_drops_thoughts_computes_the_answers_again_and_no_more(
    groups: list[CacheGroup],
) -> None:
    """What it puts before an answer is not in the next turn's prompt, either."""
    engine, history = Engine(groups), text(2, 700)
    opening, end = [7, 7, 7, 7], 0
    for turn in range(12):
        num_cached = engine.hit([*history, *opening], 200)
        assert num_cached > end - 2 * BLOCK
        end = len(history)
        history = [*history, *text(200 + turn, 60), *text(300 + turn, 40)]


@GROUPS
def test_a_document_edited_near_its_end_is_computed_from_the_last_power_of_two(
    groups: list[CacheGroup],
) -> None:
    engine, document = Engine(groups), text(3, 10_000)
    engine.hit(document)
    edited = [*document[:9000], 1, 2, 3, *document[9000:]]
    assert engine.hit(edited) == (8192 if groups is LARGE else 8992)
    assert engine.hit([*document[:9000], 4, *document[9000:]]) == 8992


@GROUPS
def test_of_eight_equal_prompts_at_once_one_is_computed(groups: list[CacheGroup]) -> None:
    engine, prompt = Engine(groups), text(4, 1000)
    handles = [engine.add(prompt, 5) for _ in range(8)]
    engine.run()
    assert [engine.deliveries.num_cached[one] for one in handles] == [0] + [992] * 7
    assert engine.scheduler.kv_cache.stats.lost_tokens["state"] == 0
    assert len({tuple(engine.deliveries.tokens[one]) for one in handles}) == 1


def test_samples_of_a_prompt_wait_for_the_step_that_computes_its_state() -> None:
    engine, prompt = Engine(LARGE), text(5, 600)
    first = engine.add(prompt, 5, n=4)
    engine.run()
    assert [engine.deliveries.num_cached[first + i] for i in range(4)] == [0, 592, 592, 592]


def test_who_waits_for_a_prefix_holds_up_nobody_and_may_be_aborted() -> None:
    engine, prompt = Engine(LARGE), text(6, 1500)
    engine.add(prompt, 3)
    follower, aborted, other = engine.add(prompt, 3), engine.add(prompt, 3), engine.add([1], 3)
    plan = engine.scheduler.schedule()
    assert [new.num_computed_tokens for new in plan.added] == [0, 0]
    assert [one.handle for one in engine.scheduler.waiting] == [follower, aborted]
    assert engine.scheduler.abort(aborted) is not None
    engine.deliveries.take(engine.scheduler, engine.executor.execute(plan))
    engine.run()
    assert engine.deliveries.num_cached[follower] == 1488
    assert len(engine.deliveries.tokens[other]) == 3
    assert aborted not in engine.deliveries.tokens


def test_a_follower_goes_on_by_itself_if_the_first_one_is_aborted() -> None:
    engine, prompt = Engine(LARGE), text(7, 5000)
    first, follower = engine.add(prompt, 3), engine.add(prompt[:1900], 3)
    plan = engine.scheduler.schedule()
    assert engine.scheduler.abort(first) is not None
    engine.deliveries.take(engine.scheduler, engine.executor.execute(plan))
    engine.run()
    assert len(engine.deliveries.tokens[follower]) == 3


def test_without_prefix_caching_nobody_waits() -> None:
    engine = Engine(LARGE)
    engine.scheduler.kv_cache.enable_prefix_caching = False
    handles = [engine.add(text(8, 900), 2) for _ in range(2)]
    assert len(engine.scheduler.schedule().added) == len(handles)


@pytest.mark.parametrize(
    ("groups", "num_slabs"),
    [
        ([CacheGroup("full", 0, 3), CacheGroup("state", 0, 7, spacing=1)], 80),
        ([CacheGroup("full", 0, 23), CacheGroup("state", 0, 4, spacing=32)], 40),
        ([CacheGroup("full", 0, 5), CacheGroup("window(40)", 40, 3)], 100),
    ],
    ids=["small", "large", "windows"],
)
def test_when_all_memory_was_used_once_the_oldest_goes_whoever_had_it(
    groups: list[CacheGroup], num_slabs: int
) -> None:
    """Rounds of requests at once, whose memory is less than half of all; then each again."""
    rng = random.Random(1)
    engine = Engine(groups, num_slabs=num_slabs)
    for number in range(20):
        prompts = [text(100 * number + i, rng.randrange(20, 250)) for i in range(8)]
        for prompt in prompts:
            engine.add(prompt, 4)
        engine.run()
        assert [engine.hit(one) for one in prompts] == [
            (len(one) - 1) // 16 * 16 for one in prompts
        ]


@pytest.mark.parametrize("budget", [19, 100, 2048])
def test_who_computes_the_same_at_once_leaves_the_state_that_any_of_them_keeps(budget: int) -> None:
    """Of copies one is findable; it may be of a request that passes on and does not keep it."""
    for seed in range(12):
        rng, shared = random.Random(seed), text(seed, 400)
        # Several states in a slab, so that one of no use is reused at once.
        groups = [CacheGroup("full", 0, 23), CacheGroup("state", 0, 4, spacing=32)]
        engine = Engine(groups, num_slabs=3000, budget=budget)
        engine.scheduler.worth_waiting_tokens = 64
        cuts = [rng.choice([16, 17, 32, 47, 48, 64, 100, 160, 240, 400]) for _ in range(12)]
        prompts = [shared[:cut] + text(i, rng.randrange(1, 40)) for i, cut in enumerate(cuts)]
        waiting = list(prompts)
        while waiting or engine.scheduler.num_requests:
            for prompt in waiting[: rng.randrange(4)]:
                engine.add(prompt, 20)
                waiting.remove(prompt)
            if engine.scheduler.num_requests:
                engine.deliveries.step(engine.scheduler, engine.executor)
        assert [engine.hit(one) for one in prompts] == list(map(whole_blocks, prompts))


def test_where_memory_is_short_the_latest_prompts_are_still_hit() -> None:
    engine, prompts = Engine(LARGE, num_slabs=60), [text(seed, 1000) for seed in range(9, 15)]
    assert [engine.hit(prompt) for prompt in prompts] == [0] * 6
    assert [engine.hit(prompt) for prompt in prompts[:-3:-1]] == [992, 992]
    assert engine.hit(prompts[0]) == 0
