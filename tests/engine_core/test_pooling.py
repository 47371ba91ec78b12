"""Embeddings from a step's result to the client: one for each who asks, and no token."""

from __future__ import annotations

import numpy as np
import pytest
from msgspec.structs import replace

from nanocore.engine_core.io.session import Backlog, output_frames
from nanocore.engine_core.scheduling.columns import TokenColumns
from nanocore.engine_core.scheduling.outputs import ClientOutput
from nanocore.engine_core.scheduling.scheduler import Scheduler
from nanocore.protocol.codec import client_decoder
from nanocore.protocol.messages import Event, Output
from nanocore.worker.plan import NO_TOKEN, ModelRunnerOutput
from tests.engine_core.scheduler_checks import Engine, run
from tests.fakes import (
    Deliveries,
    expected_embedding,
    expected_tokens,
    make_request,
    make_scheduler,
)

PROMPT = [*range(20, 31)]  # 11 tokens: 2 full blocks of 4, and 3 tokens
POOLINGS = ["last", "mean"]


@pytest.mark.parametrize("budget", [6, 9, 64])
@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("num_speculative_tokens", [0, 2])
def test_each_has_its_embedding_and_no_token_beside_others_that_have(
    budget: int, depth: int, num_speculative_tokens: int
) -> None:
    scheduler, executor = make_scheduler(
        max_num_batched_tokens=budget,
        max_num_seqs=2,
        num_speculative_tokens=num_speculative_tokens,
    )
    eos = tuple(expected_tokens([3, *PROMPT], 1))  # what would end it counts for nothing, too
    scheduler.add(make_request(1, PROMPT, 1, pooling="last"))
    scheduler.add(make_request(2, PROMPT, 6, client=2))
    scheduler.add(make_request(3, [3, *PROMPT], 1, client=2, pooling="mean", eos=eos))
    scheduler.add(make_request(4, [5], 1, pooling="mean"))
    deliveries = run(scheduler, executor, depth)
    assert deliveries.tokens == {2: expected_tokens(PROMPT, 6)}
    assert deliveries.finish_reasons == {1: "stop", 2: "length", 3: "stop", 4: "stop"}
    prompts = {1: PROMPT, 3: [3, *PROMPT], 4: [5]}
    assert deliveries.embeddings == {h: expected_embedding(one) for h, one in prompts.items()}
    assert deliveries.num_cached.keys() == {1, 2, 3, 4}
    assert scheduler.counters.generation_tokens == 6
    num_cached = sum(deliveries.num_cached.values())
    assert scheduler.counters.prompt_tokens == 2 * 11 + 12 + 1 - num_cached


def test_a_mean_reads_no_cached_prefix_and_the_last_token_does() -> None:
    scheduler, executor = make_scheduler()
    scheduler.add(make_request(1, PROMPT, 2))
    run(scheduler, executor)
    scheduler.add(make_request(2, PROMPT, 1, pooling="mean"))
    scheduler.add(make_request(3, PROMPT, 1, pooling="last"))
    scheduler.add(make_request(4, PROMPT, 1, pooling="last", skip_reading_prefix_cache=True))
    deliveries = run(scheduler, executor)
    assert deliveries.num_cached == {2: 0, 3: 8, 4: 0}
    assert deliveries.embeddings == dict.fromkeys((2, 3, 4), expected_embedding(PROMPT))


@pytest.mark.parametrize("pooling", POOLINGS)
def test_after_a_preemption_in_the_prompt_a_mean_is_begun_again(pooling: str) -> None:
    engine = Engine(num_blocks=9, max_num_seqs=4, long_prefill_token_threshold=1)
    prompt = [*range(24)]
    computed: list[int] = []
    engine.add(1, [5] * 6, 24)
    engine.step()
    engine.add(2, prompt, 1, pooling=pooling)
    while engine.scheduler.num_requests:
        added = engine.step().added
        computed += [new.num_computed_tokens for new in added if new.num_prompt_tokens == 24]
    assert len(computed) > 1, "it was preempted"
    assert any(computed) == (pooling == "last")
    assert engine.deliveries.embeddings == {2: expected_embedding(prompt)}
    assert engine.tokens == {1: expected_tokens([5] * 6, 24)}


def in_flight() -> tuple[Scheduler, ModelRunnerOutput]:
    """Two prompts in one step, the first of which is pooled; and the step's right result."""
    scheduler, executor = make_scheduler()
    scheduler.add(make_request(1, PROMPT, 1, pooling="mean"))
    scheduler.add(make_request(2, [7] * 5, 5))
    return scheduler, executor.execute(scheduler.schedule())


@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf])
def test_an_embedding_that_is_not_finite_is_an_error_and_nobody_finds_its_blocks(
    number: float,
) -> None:
    scheduler, result = in_flight()
    pooled = np.array([0.5, number, 1.0, 2.0], "<f4").tobytes()
    deliveries = Deliveries()
    deliveries.take(scheduler, replace(result, pooled=pooled))
    assert deliveries.finish_reasons == {1: "error"}
    assert deliveries.embeddings == {}
    assert "the embedding is not finite" in deliveries.messages[1]
    assert [*deliveries.tokens] == [2]
    scheduler.add(make_request(3, PROMPT, 1, pooling="last"))
    assert scheduler.schedule().added[0].num_computed_tokens == 0


def test_logits_that_are_not_finite_are_an_error_of_it_too() -> None:
    scheduler, result = in_flight()
    token_ids = np.frombuffer(result.token_ids, "<i4").copy()
    token_ids[0] = NO_TOKEN
    deliveries = Deliveries()
    deliveries.take(scheduler, replace(result, token_ids=token_ids.tobytes()))
    assert deliveries.finish_reasons == {1: "error"}
    assert deliveries.embeddings == {}


@pytest.mark.parametrize(
    ("rows", "num_bytes"),
    [([], 0), ([1], 16), ([0, 1], 32), ([0, 0], 32), ([5], 16), ([0], 0), ([0], 15), ([], 16)],
)
def test_a_result_whose_embeddings_do_not_fit_is_refused(rows: list[int], num_bytes: int) -> None:
    scheduler, result = in_flight()
    wrong = replace(result, pooled_rows=np.array(rows, "<i4").tobytes(), pooled=bytes(num_bytes))
    with pytest.raises(ValueError, match=r"step 1 has embeddings, .*: they must be of \[0\]"):
        scheduler.update(wrong)


def test_many_embeddings_are_several_messages_each_below_the_limit() -> None:
    events = [
        Event(handle=h, finish_reason="stop", embedding=bytes([h]) * 4000) for h in range(1, 8)
    ]
    events += [Event(handle=9, num_cached_tokens=0), Event(handle=9, finish_reason="length")]
    tokens = TokenColumns(np.array([9], np.uint32), np.array([3], np.int32))
    output = ClientOutput(1, tokens, events)
    assert len(output_frames(output)) == 1
    messages = [client_decoder().decode(frames) for frames in output_frames(output, 8000)]
    assert len(messages) == 5
    said: list[Event] = []
    for message in messages:
        assert isinstance(message, Output)
        assert sum(len(event.embedding or b"") for event in message.events) <= 8000
        said += message.events
    assert {event.handle: event.embedding for event in said if event.embedding} == {
        event.handle: event.embedding for event in events[:7]
    }
    assert [event for event in said if not event.embedding] == events[7:]


def test_embeddings_that_wait_for_a_slow_client_are_counted_until_they_are_sent() -> None:
    nothing = TokenColumns(np.zeros(0, np.uint32), np.zeros(0, np.int32))
    backlog = Backlog(client=1, since_s=0.0)
    for handle in range(300):
        event = Event(handle=handle, finish_reason="stop", embedding=bytes(4000))
        backlog.add(ClientOutput(1, nothing, [event]))
    assert backlog.num_bytes == backlog.logprobs_bytes == 300 * 4000
    num_messages = 0
    while backlog.next() is not None:
        backlog.drop_next()
        num_messages += 1
    assert num_messages > 2
    assert (backlog.num_bytes, backlog.logprobs_bytes) == (0, 0)
