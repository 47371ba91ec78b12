"""A row whose logits are not finite ends its request, with words, and nothing of it is shared."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from nanocore.engine_core.scheduling.scheduler import Scheduler
from nanocore.protocol.structured_outputs import StructuredOutputs
from nanocore.worker.plan import NO_TOKEN
from tests.engine_core.scheduler_checks import check_blocks, check_idle, check_plan
from tests.fakes import (
    Deliveries,
    PipelinedExecutor,
    expected_tokens,
    make_request,
    make_scheduler,
    next_token,
)

DAMAGED = 49
"""A token after which the fake model has no next one."""


def sample(token_ids: list[int]) -> int:
    return NO_TOKEN if DAMAGED in token_ids else next_token(token_ids) % DAMAGED


class Engine:
    """A scheduler with some steps in flight, and a worker that knows no token after DAMAGED."""

    def __init__(
        self, depth: int = 1, sample: Callable[[list[int]], int] = sample, **limits: object
    ) -> None:
        self.scheduler, executor = make_scheduler(**limits)  # type: ignore[arg-type]
        executor.sample = sample
        self.depth, self.worker = depth, PipelinedExecutor(executor)
        self.deliveries = Deliveries()

    def run(self, prompts: dict[int, list[int]], max_tokens: int = 6) -> None:
        scheduler: Scheduler = self.scheduler
        for handle, prompt in prompts.items():
            scheduler.add(make_request(handle, prompt, max_tokens))
        while scheduler.num_requests or len(self.worker):
            while len(self.worker) < self.depth and (group := scheduler.next_group()) is not None:
                plan = scheduler.schedule(group)
                check_plan(scheduler, plan)
                self.worker.submit(plan)
            self.deliveries.take(scheduler, self.worker.collect())
            check_blocks(scheduler)


def healthy_tokens(prompt: list[int], max_tokens: int = 6) -> list[int]:
    context = list(prompt)
    while len(context) < len(prompt) + max_tokens:
        context.append(next_token(context) % DAMAGED)
    return context[len(prompt) :]


@pytest.mark.parametrize(("depth", "num_groups"), [(1, 1), (2, 1), (3, 1), (2, 2)])
def test_the_request_ends_with_an_error_and_all_others_go_on(depth: int, num_groups: int) -> None:
    engine = Engine(
        depth, max_num_batched_tokens=12, max_num_seqs=4, num_blocks=24, num_groups=num_groups
    )
    prompts = {handle: [handle] * (2 + 3 * handle) for handle in range(8)}
    for handle in (1, 4, 6):
        prompts[handle][handle] = DAMAGED
    engine.run(prompts)
    deliveries = engine.deliveries
    for handle, prompt in prompts.items():
        if DAMAGED in prompt:
            assert handle not in deliveries.tokens
            assert deliveries.finish_reasons[handle] == "error"
            assert "output token 1 are not finite" in deliveries.messages[handle]
            assert "--dtype float32" in deliveries.messages[handle]
        else:
            assert deliveries.tokens[handle] == healthy_tokens(prompt)
            assert deliveries.finish_reasons[handle] == "length"
    check_idle(engine.scheduler)


@pytest.mark.parametrize("depth", [1, 2])
def test_the_message_says_at_which_token(depth: int) -> None:
    """The tokens before it are delivered; also where it would have been the last one."""
    engine = Engine(depth, lambda context: NO_TOKEN if len(context) == 9 else next_token(context))
    engine.run({1: [1] * 6, 2: [2] * 3, 3: [3] * 9}, max_tokens=4)
    assert engine.deliveries.tokens[1] == expected_tokens([1] * 6, 3)
    assert "output token 4 " in engine.deliveries.messages[1]
    assert engine.deliveries.tokens[2] == expected_tokens([2] * 3, 4)
    assert "output token 1 " in engine.deliveries.messages[3]


@pytest.mark.parametrize(
    ("sampling", "names"),
    [
        ({}, ""),
        ({"stop_token_ids": (7,), "top_k": 3, "logprobs": 1}, ""),
        ({"allowed_token_ids": [1, 2]}, "allowed_token_ids"),
        ({"logit_bias": [(1, -100.0)], "min_tokens": 2}, "logit_bias, min_tokens"),
        ({"bad_words_token_ids": [[1, 2]]}, "bad_words_token_ids"),
        (
            {"structured_outputs": StructuredOutputs(json_object=True), "min_tokens": 2},
            "structured_outputs, min_tokens",
        ),
    ],
)
def test_masks_that_may_have_left_no_token_are_named(
    sampling: dict[str, object], names: str
) -> None:
    scheduler, executor = make_scheduler()
    executor.sample = sample
    deliveries = Deliveries()
    scheduler.add(make_request(1, [1, DAMAGED], 6, **sampling))  # type: ignore[arg-type]
    deliveries.step(scheduler, executor)
    message = deliveries.messages[1]
    if names:
        assert message.startswith(f"no token is left to choose for output token 1: {names} of")
        assert "the model's logits are not finite" in message
    else:
        assert message.startswith("the logits of output token 1 are not finite")


def test_what_was_computed_of_it_is_not_found_again() -> None:
    """Prompt and outputs, and the blocks that it had found."""
    engine = Engine()
    prefix = [7] * 12
    engine.run({1: prefix, 2: [*prefix, DAMAGED, *prefix]})
    assert engine.deliveries.num_cached == {1: 0}
    engine.run({3: [*prefix, 5]})
    assert engine.deliveries.num_cached[3] == 0
    assert engine.deliveries.tokens[3] == healthy_tokens([*prefix, 5])
    engine.run({4: [*prefix, 5]})
    assert engine.deliveries.num_cached[4] == 12


def test_who_shares_its_blocks_keeps_them() -> None:
    engine = Engine()
    prefix = [7] * 12
    prompts = {1: [*prefix, 1], 2: [*prefix, DAMAGED], 3: [*prefix, 3]}
    engine.run(prompts, max_tokens=9)
    assert engine.deliveries.tokens == {i: healthy_tokens(prompts[i], 9) for i in (1, 3)}


def test_an_id_whose_bytes_look_like_none_is_a_token() -> None:
    """0x00ffffff before 0x000000ff: between them four bytes of ones."""
    engine = Engine(sample=lambda context: [0xFF0000FF, 0xFFFFFF][len(context) % 2] & 0x7FFFFFFF)
    engine.run({1: [1] * 3, 2: [2] * 4}, max_tokens=2)
    assert engine.deliveries.finish_reasons == {1: "length", 2: "length"}
