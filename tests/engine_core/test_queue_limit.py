"""What may wait, what a refusal says, and when it says that there will be room."""

from __future__ import annotations

from contextlib import suppress

import msgspec
import pytest

from nanocore.engine_core.io.limits import (
    MAX_RETRY_S,
    MAX_UNKNOWN_RETRY_S,
    MIN_RETRY_S,
    UNKNOWN_RETRY_S,
    QueueLimit,
    held_bytes,
)
from nanocore.engine_core.log.event_log import SchedulerCounters
from nanocore.protocol.errors import EngineOverloadedError
from nanocore.protocol.messages import Submit
from nanocore.protocol.structured_outputs import StructuredOutputs
from tests.engine_core.test_admission import admission, submit
from tests.fakes import make_request, make_scheduler


class Queue:
    """A limit of 10 requests, 1,000 tokens and 100,000 bytes, at a time of its own."""

    def __init__(self) -> None:
        self.counters = SchedulerCounters()
        self.now_s = 100.0
        self.limit = QueueLimit(10, 1000, self.counters, 100_000, lambda: self.now_s)

    def fill(self, num_reqs: int = 10, num_tokens: int = 1, num_bytes: int = 1) -> None:
        for _ in range(num_reqs):
            self.limit.enter(num_tokens, 1, num_bytes)

    def drain(self, num_reqs: int, seconds: float = 0.0, num_tokens: int = 1) -> None:
        self.now_s += seconds
        self.counters.dequeued_s = self.now_s
        self.counters.dequeued_reqs += num_reqs
        self.counters.dequeued_tokens += num_reqs * num_tokens
        self.counters.dequeued_bytes += num_reqs

    def let_go(self, num_reqs: int, seconds: float, num_tokens: int = 1, more: int = 0) -> None:
        """So many leave in so many seconds, and as many come in their place."""
        self.drain(num_reqs, seconds, num_tokens)
        for _ in range(num_reqs + more):
            self.limit.enter(num_tokens, 1, 1)

    def refuse(
        self, num_tokens: int = 1, num_samples: int = 1, num_bytes: int = 1
    ) -> EngineOverloadedError:
        with pytest.raises(EngineOverloadedError) as caught:
            self.limit.enter(num_tokens, num_samples, num_bytes)
        return caught.value


@pytest.fixture
def queue() -> Queue:
    return Queue()


@pytest.mark.parametrize(
    ("filled", "more", "flag"),
    [
        ((10, 1, 1), (1, 1, 1), "--max-num-queued-reqs"),
        ((1, 1, 1), (1, 10, 1), "--max-num-queued-reqs"),
        ((2, 500, 1), (1, 1, 1), "--max-num-queued-tokens"),
        ((2, 1, 50_000), (1, 1, 1), "--max-num-queued-bytes"),
    ],
)
def test_each_limit_is_named_by_its_flag(
    queue: Queue, filled: tuple[int, int, int], more: tuple[int, int, int], flag: str
) -> None:
    queue.fill(*filled)
    assert f"({flag})" in str(queue.refuse(*more))


def test_one_request_may_always_wait(queue: Queue) -> None:
    queue.limit.enter(10**6, 100, 10**9)
    queue.refuse()
    queue.drain(100, num_tokens=10**4)
    queue.counters.dequeued_bytes += 10**9
    queue.fill()


def test_who_has_nothing_here_is_not_kept_out_by_others(queue: Queue) -> None:
    queue.fill()
    queue.limit.enter(1000, 1, 1, is_only=True)
    queue.refuse()
    with pytest.raises(EngineOverloadedError, match="here come 2 samples more"):
        queue.limit.enter(1, 2, 1, is_only=True)
    with pytest.raises(EngineOverloadedError, match="--max-num-queued-bytes"):
        queue.limit.enter(1, 1, 100_000, is_only=True)


def test_what_is_refused_is_not_counted(queue: Queue) -> None:
    queue.fill(9)
    queue.refuse(num_samples=2)
    queue.refuse(num_tokens=1000)
    queue.refuse(num_bytes=100_000)
    queue.limit.enter(1, 1, 1)


def test_with_nothing_known_it_is_a_second(queue: Queue) -> None:
    queue.fill()
    error = queue.refuse()
    assert error.retry_after_s == UNKNOWN_RETRY_S
    assert str(error).endswith("try again in 1 s")


def test_it_is_the_time_that_the_queue_takes_to_make_room(queue: Queue) -> None:
    queue.fill()
    for _ in range(20):
        queue.let_go(2, seconds=1.0)
    assert queue.refuse().retry_after_s == pytest.approx(0.5)
    assert queue.refuse(num_samples=6).retry_after_s == pytest.approx(3.0)


def test_tokens_and_bytes_take_their_own_time(queue: Queue) -> None:
    queue.fill(5, num_tokens=200)
    for _ in range(20):
        queue.let_go(1, seconds=1.0, num_tokens=200)
    assert queue.refuse(num_tokens=600).retry_after_s == pytest.approx(3.0)
    assert queue.refuse(num_tokens=10**6).retry_after_s == pytest.approx(5.0)  # all that waits


def test_the_pace_of_late_counts_more_than_that_of_old(queue: Queue) -> None:
    queue.fill()
    for _ in range(50):
        queue.let_go(4, seconds=1.0)
    fast_s = queue.refuse().retry_after_s
    for _ in range(50):
        queue.let_go(1, seconds=1.0)
    assert queue.refuse().retry_after_s == pytest.approx(4 * fast_s, rel=0.05)


def test_times_in_which_nobody_waits_do_not_count(queue: Queue) -> None:
    queue.fill()
    for _ in range(20):
        queue.let_go(2, seconds=1.0)
    queue.drain(10, seconds=5.0)
    queue.now_s += 3600.0
    queue.fill()
    assert queue.refuse().retry_after_s == pytest.approx(0.5)


def test_before_anything_has_drained_it_is_as_long_again_within_seconds(queue: Queue) -> None:
    queue.fill()
    for waited_s, expected_s in ((0.02, 1.0), (3.0, 3.02), (30.0, MAX_UNKNOWN_RETRY_S)):
        queue.refuse()
        queue.now_s += waited_s
        assert queue.refuse().retry_after_s == pytest.approx(expected_s)


def test_what_drained_while_nobody_looked_is_timed_by_when_it_did(queue: Queue) -> None:
    """Who is told to come back late does not find that the queue is slow."""
    queue.fill()
    queue.refuse()
    queue.drain(10, seconds=5.0)
    queue.now_s += 60.0
    queue.fill()
    assert queue.refuse().retry_after_s == pytest.approx(0.5)


def test_the_next_one_is_due_when_it_has_not_left_for_a_while(queue: Queue) -> None:
    queue.fill()
    queue.let_go(1, seconds=4.0)
    queue.let_go(1, seconds=4.0)
    for waited_s, expected_s in ((1.0, 3.0), (2.0, 1.0), (5.0, 4.0)):  # at last it is late
        queue.now_s += waited_s
        assert queue.refuse().retry_after_s == pytest.approx(expected_s)
    assert queue.refuse(num_samples=2).retry_after_s == pytest.approx(8.0)


def test_free_rows_are_not_waited_for(queue: Queue) -> None:
    queue.counters.num_free_rows = 2
    queue.fill(12)
    assert "10 requests wait" in str(queue.refuse())
    queue.counters.count_dequeued(make_request(1, [1], 2), now_s=queue.now_s)
    queue.counters.count_dequeued(make_request(2, [1], 2), now_s=queue.now_s)
    assert queue.counters.num_free_rows == 0
    assert queue.refuse().retry_after_s == UNKNOWN_RETRY_S  # those two say nothing of the others


def test_no_row_is_free_while_the_engine_is_paused(queue: Queue) -> None:
    queue.counters.num_free_rows = 2
    queue.counters.is_paused = True
    queue.fill(10)
    queue.refuse()
    queue.counters.is_paused = False
    queue.fill(2)
    queue.refuse()


def test_rows_are_free_if_the_last_step_left_nobody_waiting() -> None:
    scheduler, executor = make_scheduler(max_num_seqs=2)
    counters = scheduler.counters

    def step() -> None:
        scheduler.update(executor.execute(scheduler.schedule()))

    assert counters.num_free_rows == 2
    scheduler.add(make_request(1, [1], 2))
    step()
    assert counters.num_free_rows == 1
    for handle in (2, 3):
        scheduler.add(make_request(handle, [1], 2))
    step()  # the first ends, and its row is for the one that waits
    assert counters.num_free_rows == 0
    step()
    step()
    assert counters.num_free_rows == 2


def test_a_queue_that_stands_still_says_the_longest_time_and_a_fast_one_the_shortest(
    queue: Queue,
) -> None:
    queue.fill()
    queue.let_go(1, seconds=1.0)
    queue.now_s += 100.0
    assert queue.refuse().retry_after_s == MAX_RETRY_S
    fast = Queue()
    fast.fill()
    for _ in range(100):
        fast.let_go(10, seconds=0.02)
    assert fast.refuse().retry_after_s == MIN_RETRY_S


def test_bytes_are_of_all_that_a_request_holds() -> None:
    plain = submit(16, 4)
    assert plain.sampling is not None

    def size(prompt: Submit = plain, **sampling: object) -> int:
        params = msgspec.structs.replace(plain.sampling, **sampling)  # type: ignore[type-var]
        return held_bytes(prompt, params, block_size=4)

    assert size() > 64
    assert size(msgspec.structs.replace(plain, output_token_ids=bytes(4000))) > size() + 4000
    assert size(n=4) > 3 * size()
    assert size(allowed_token_ids=[*range(1000)]) >= size() + 8000
    assert size(logit_bias=[(i, 1.0) for i in range(1000)]) >= size() + 16_000
    assert size(bad_words_token_ids=[[1, 2]] * 100) >= size() + 1600
    schema = StructuredOutputs(regex="a" * 5000)
    assert size(structured_outputs=schema) >= size() + 5000


def test_a_request_s_bytes_are_counted_until_it_leaves_the_queue() -> None:
    counters = SchedulerCounters()
    limited = admission(queue_limit=QueueLimit(100, 10**6, counters, 100_000))
    wide = list(range(2, 50)) * 20
    request = limited.build(submit(8, 4, allowed_token_ids=wide), handle=1, client=1)
    assert request.num_bytes > len(wide) * 8
    num_built = 1
    with suppress(EngineOverloadedError):
        while num_built < 100:
            limited.build(submit(8, 4, allowed_token_ids=wide), handle=1 + num_built, client=1)
            num_built += 1
    assert num_built == 100_000 // request.num_bytes
    counters.count_dequeued(request, now_s=1.0)
    assert counters.dequeued_bytes == request.num_bytes
    limited.build(submit(8, 4, allowed_token_ids=wide), handle=101, client=1)
