"""Requests that bring outputs of an earlier run: what is refused, what ends at once, what waits."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from nanocore.engine_core.io.limits import QueueLimit
from nanocore.engine_core.log.event_log import SchedulerCounters
from nanocore.engine_core.mailbox import AddRequest
from nanocore.engine_core.requests.request import Request
from nanocore.engine_core.scheduling.scheduler import Scheduler
from nanocore.protocol.errors import (
    ContextLengthError,
    EngineOverloadedError,
    InvalidRequestError,
)
from nanocore.protocol.messages import Accepted, Error, Event, Message, Output, Submit
from nanocore.protocol.sampling import EngineSamplingParams
from nanocore.protocol.structured_outputs import StructuredOutputs
from tests.engine_core.scripted_io import Io
from tests.engine_core.test_admission import MAX_MODEL_LEN, admission
from tests.engine_core.test_admission import submit as submit_of
from tests.fakes import (
    VOCAB_SIZE,
    Deliveries,
    FakeExecutor,
    FakeMatcher,
    allowed_tokens,
    expected_tokens,
    make_request,
    make_scheduler,
)

EOS = 3  # of the admission's model; the desk's has none
WANTED = StructuredOutputs(regex="a")
ALLOWED = min(allowed_tokens([]))
FORBIDDEN = min({*range(VOCAB_SIZE)} - allowed_tokens([]))


def resumed(
    outputs: list[int], num_prompt: int = 5, max_tokens: int | None = 8, **given: Any
) -> Submit:
    column = np.array(outputs, "<i4").tobytes()
    return msgspec.structs.replace(
        submit_of(num_prompt, max_tokens, **given), output_token_ids=column
    )


def test_outputs_stand_behind_the_prompt_and_count_as_output() -> None:
    request = admission().build(resumed([7, 8, 9, 7]), handle=1, client=1)
    assert request.token_ids is not None
    assert request.token_ids.tolist() == [0, 1, 2, 3, 4, 7, 8, 9, 7]
    assert (request.num_prompt_tokens, request.num_submitted_tokens) == (5, 9)
    assert request.max_num_tokens == 5 + 8
    assert len(request.key_chain.keys) == 2, "of all tokens"


def test_no_outputs_are_a_new_request() -> None:
    request = admission().build(resumed([]), handle=1, client=1)
    assert (request.num_prompt_tokens, request.num_submitted_tokens) == (5, 5)


@pytest.mark.parametrize(
    ("submit", "words"),
    [
        (resumed([7, 50, 7]), r"output_token_ids\[1\]=50 is not a token id"),
        (resumed([7, -1]), r"output_token_ids\[1\]=-1 is not a token id"),
        (resumed([7], n=2), r"output_token_ids with n=2: .* seed \+ i"),
        (resumed([7], max_tokens=1, pooling="last"), "output_token_ids with pooling='last'"),
        (resumed([7] * 9), "output_token_ids has 9 tokens, more than max_tokens=8"),
        (
            resumed([7, EOS, 8, 9]),
            r"output_token_ids\[1\]=3 is EOS or a stop id: .* goes on after it",
        ),
        (resumed([9, 9], stop_token_ids=[9]), r"output_token_ids\[0\]=9 is EOS or a stop id"),
        (resumed([EOS, 7, EOS, 7], min_tokens=1), r"output_token_ids\[2\]=3"),
    ],
)  # fmt: skip
def test_outputs_that_no_run_has_produced_are_refused(submit: Submit, words: str) -> None:
    with pytest.raises(InvalidRequestError, match=words):
        admission().build(submit, handle=1, client=1)


def test_prompt_and_outputs_must_fit_the_model() -> None:
    build = admission().build
    outputs = [7] * (MAX_MODEL_LEN - 5)
    request = build(resumed(outputs, max_tokens=None), handle=1, client=1)
    assert request.num_tokens == request.max_num_tokens == MAX_MODEL_LEN
    with pytest.raises(ContextLengthError, match=r"output_token_ids 60.*max_model_len=64"):
        build(resumed([*outputs, 7], max_tokens=None), handle=2, client=1)


def test_what_does_not_end_a_request_may_stand_anywhere_in_its_outputs() -> None:
    build = admission().build
    build(resumed([EOS, 7], min_tokens=1), handle=1, client=1)
    build(resumed([EOS, EOS, 7], ignore_eos=True), handle=2, client=1)


def test_the_queue_counts_outputs_as_well_as_the_prompt() -> None:
    counters = SchedulerCounters()
    limited = admission(queue_limit=QueueLimit(10, 20, counters))
    limited.build(resumed([7] * 8), handle=1, client=1)
    with pytest.raises(EngineOverloadedError, match="13"):
        limited.build(submit_of(8, 4), handle=2, client=1)


def finish(scheduler: Scheduler, executor: FakeExecutor, *requests: Request) -> Deliveries:
    deliveries = Deliveries()
    for request in requests:
        scheduler.add(request)
    while scheduler.num_requests:
        deliveries.step(scheduler, executor)
    return deliveries


def test_a_resumed_requests_tokens_leave_the_queue_and_are_no_new_ones() -> None:
    scheduler, executor = make_scheduler()
    whole = expected_tokens([1, 2], 9)
    deliveries = finish(scheduler, executor, make_request(1, [1, 2], 9, outputs=whole[:4]))
    assert deliveries.tokens == {1: whole[4:]}
    counters = scheduler.counters
    assert (counters.prompt_tokens, counters.generation_tokens) == (2, 5)
    assert (counters.dequeued_reqs, counters.dequeued_tokens) == (1, 6)


def test_cached_tokens_are_of_the_prompt_alone() -> None:
    scheduler, executor = make_scheduler()
    prompt = [1, 2, 0, 1, 2]
    whole = expected_tokens(prompt, 13)
    assert finish(scheduler, executor, make_request(1, prompt, 13)).num_cached == {1: 0}
    deliveries = finish(scheduler, executor, make_request(2, prompt, 13, outputs=whole[:11]))
    assert deliveries.num_cached == {2: 5}
    assert scheduler.kv_cache.stats.hits == 12, "tokens in whole blocks, outputs among them"


# At the desk.


def ask(io: Io, outputs: list[int], **given: Any) -> list[Message]:
    """Submit a request of one prompt token; what is answered."""
    io.receive(
        Submit(
            request_id="x",
            prompt_token_ids=b"\1\0\0\0",
            output_token_ids=np.array(outputs, "<i4").tobytes(),
            sampling=EngineSamplingParams(**given),
        )
    )
    return io.take_sent()


def check_ended(io: Io, sent: list[Message], **event: Any) -> None:
    """It was accepted and has ended, and its id and its place are free."""
    io.work()
    accepted, output = sent + io.take_sent()
    assert isinstance(accepted, Accepted)
    assert isinstance(output, Output)
    assert output.events == [Event(handle=accepted.handle, **event)]
    assert not output.tokens
    assert not io.handler.sessions.request_ids
    assert io.scheduler.num_requests == io.scheduler.num_unready == 0
    assert not io.scheduler.log.take().requests, "it is not logged"
    io.check_tables()
    for i in range(8):
        io.submit(f"another {i}")


def test_outputs_of_the_whole_length_end_a_request_at_once(io: Io) -> None:
    check_ended(io, ask(io, [7, 8], max_tokens=2), finish_reason="length")


def test_outputs_that_end_with_a_stop_id_do_so_with_it(io: Io) -> None:
    sent = ask(io, [7, 8], max_tokens=2, stop_token_ids=[8])
    check_ended(io, sent, finish_reason="stop", stop_reason=8)


def test_a_stop_id_before_min_tokens_is_a_token_like_others(io: Io) -> None:
    (accepted,) = ask(io, [7, 8], max_tokens=9, min_tokens=2, stop_token_ids=[8])
    assert isinstance(accepted, Accepted)
    assert isinstance(io.inbox.get_nowait(), AddRequest)


def test_a_structured_request_waits_until_its_matcher_knows_its_outputs(io: Io) -> None:
    io.submit_structured("first", "a")
    io.grammars.finish()
    io.work()
    io.take_sent()
    assert ask(io, [ALLOWED], structured_outputs=WANTED, max_tokens=9) == [], "although it is known"
    io.grammars.finish()
    io.work()
    io.take_one(Accepted)
    _, request = io.scheduler.waiting
    assert isinstance(request.matcher, FakeMatcher)
    assert request.matcher.output == [ALLOWED]


def test_outputs_that_the_grammar_forbids_are_refused(io: Io) -> None:
    ask(io, [FORBIDDEN], structured_outputs=WANTED, max_tokens=9)
    io.grammars.finish()
    io.work()
    error = io.take_one(Error)
    assert (error.code, error.request_id) == ("invalid_request", "x")
    assert "output_token_ids[0]" in error.message
    assert io.scheduler.num_requests == io.scheduler.num_unready == 0
    io.check_tables()


def test_structured_outputs_of_the_whole_length_end_when_they_are_known_to_be_right(
    io: Io,
) -> None:
    assert ask(io, [ALLOWED], structured_outputs=WANTED, max_tokens=1) == []
    io.grammars.finish()
    check_ended(io, io.take_sent(), finish_reason="length")
