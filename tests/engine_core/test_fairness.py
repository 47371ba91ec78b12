"""Sessions share what is admitted: nobody waits for all that another one has asked for."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanocore.engine_core.policy.order import precedence_key
from nanocore.engine_core.policy.waiting_queue import DeficitRoundRobin, WaitingQueue
from nanocore.engine_core.requests.request import Request
from nanocore.engine_core.scheduling.scheduler import Scheduler
from tests.campaign import examples
from tests.engine_core.fairness_checks import FairnessWatch
from tests.engine_core.scheduler_checks import run
from tests.fakes import Deliveries, FakeExecutor, make_request, make_scheduler

QUANTUM = 8


def make_queue(policy: str = "fcfs", aging_s: float = 0.0) -> WaitingQueue:
    precedence = precedence_key(policy, aging_s)  # type: ignore[arg-type]
    return WaitingQueue(precedence, policy == "priority", QUANTUM)


def take_all(queue: WaitingQueue) -> Iterator[Request]:
    """Admit everybody; nothing of any prompt is cached."""
    while (head := queue.head()) is not None:
        assert queue.head() is head
        queue.admit(head, head.num_tokens)
        yield head


def order_of_admissions(scheduler: Scheduler, executor: FakeExecutor) -> list[int]:
    """Handles of all requests, as they got their rows, while they are seen through."""
    deliveries, order = Deliveries(), []
    while scheduler.num_requests:
        deliveries.step(scheduler, executor)
        order += [request.handle for request in scheduler.completed.plan.new]
    return order


def test_one_request_beside_a_thousand_is_admitted_among_the_next_two() -> None:
    scheduler, executor = make_scheduler(max_num_seqs=2)
    for handle in range(1, 1001):
        scheduler.add(make_request(handle, [handle % 50], 1, client=1))
    Deliveries().step(scheduler, executor)
    scheduler.add(make_request(1001, [7], 1, client=2))
    deliveries = Deliveries()
    deliveries.step(scheduler, executor)
    assert 1001 in [request.handle for request in scheduler.completed.plan.new]


def test_sessions_take_turns_and_each_keeps_its_order() -> None:
    scheduler, executor = make_scheduler(max_num_seqs=1)
    clients = [1, 1, 1, 1, 2, 2, 3, 1]
    for handle, client in enumerate(clients, 1):
        scheduler.add(make_request(handle, [handle], 1, client=client))
    assert order_of_admissions(scheduler, executor) == [1, 5, 7, 2, 6, 3, 4, 8]


def test_a_session_alone_is_served_as_its_requests_came() -> None:
    queue = make_queue()
    lengths = [1, 30, 2, 9, 8, 100, 1]
    for handle, length in enumerate(lengths, 1):
        queue.push(make_request(handle, [1] * length, 1))
    assert [request.handle for request in take_all(queue)] == [1, 2, 3, 4, 5, 6, 7]


def test_who_asks_for_more_tokens_gets_fewer_turns() -> None:
    # A quantum of 8: session 1's requests are worth 3 of them, session 2's one.
    queue = make_queue()
    for i in range(9):
        queue.push(make_request(1 + i, [1] * 24, 1, client=1))
        queue.push(make_request(101 + i, [1] * 8, 1, client=2))
    clients = [request.client for request in take_all(queue)]
    assert clients[:12] == [1, 2, 2, 2] * 3


def test_small_prompts_cost_a_quantum_for_the_rows_they_take() -> None:
    queue = make_queue()
    for i in range(5):
        queue.push(make_request(1 + i, [1], 1, client=1))
        queue.push(make_request(101 + i, [1] * 8, 1, client=2))
    assert [request.client for request in take_all(queue)] == [1, 2] * 5


def test_what_a_session_owes_it_owes_when_it_comes_back() -> None:
    queue = make_queue()
    for i in range(6):
        queue.push(make_request(1 + i, [1] * 8, 1, client=1))
    queue.push(make_request(101, [1] * 32, 1, client=2))
    taken = take_all(queue)
    assert [next(taken).client for _ in range(2)] == [1, 2]
    queue.push(make_request(102, [1] * 8, 1, client=2))  # 4 quanta are not paid
    queue.push(make_request(201, [1] * 8, 1, client=3))
    assert [request.client for request in taken] == [3, 1, 1, 1, 2, 1, 1]


def test_one_request_at_a_time_gets_no_more_turns_than_many() -> None:
    queue = make_queue()
    for i in range(20):
        queue.push(make_request(1 + i, [1], 1, client=1))
    counts = Counter[int]()
    for i, request in enumerate(take_all(queue)):
        counts[request.client] += 1
        assert abs(counts[1] - counts[2]) <= 1
        if request.client == 2 or i == 0:
            queue.push(make_request(100 + i, [1], 1, client=2))
        if counts[2] == 10:
            break


def test_a_preempted_request_has_had_its_turn() -> None:
    queue = make_queue()
    for handle, client in ((1, 1), (2, 1), (3, 2), (4, 2)):
        queue.push(make_request(handle, [1], 1, client=client))
    taken = take_all(queue)
    first, second = next(taken), next(taken)
    assert (first.handle, second.handle) == (1, 3)
    for request in (second, first):
        request.num_cached_tokens = 0  # it had a row
        queue.push(request)
    assert [request.handle for request in taken] == [1, 3, 2, 4]


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_a_head_that_does_not_fit_is_not_passed_by_whoever_comes(policy: str) -> None:
    # 8 blocks of 4, of which 1 holds 4 until it ends; 2 needs 5.
    scheduler, executor = make_scheduler(policy=policy, num_blocks=8, block_size=4)
    deliveries = Deliveries()
    scheduler.add(make_request(1, [1] * 13, 4, client=1))
    scheduler.add(make_request(2, [2] * 20, 2, client=2))
    handle = 2
    while 1 not in deliveries.finish_reasons:
        deliveries.step(scheduler, executor)
        for client in (1, 3, handle + 10):
            handle += 1
            scheduler.add(make_request(handle, [3], 1, client=client))
        head = scheduler.waiting.head()
        assert head is not None
        assert head.handle == 2
    deliveries.step(scheduler, executor)
    assert scheduler.completed.plan.new[0].handle == 2
    while scheduler.num_requests:
        deliveries.step(scheduler, executor)


def test_priorities_go_before_turns() -> None:
    queue = make_queue("priority")
    for handle, client, priority in ((1, 1, 1), (2, 1, 0), (3, 1, 0), (4, 2, 1), (5, 2, 0)):
        queue.push(make_request(handle, [1], 1, client=client, priority=priority))
    assert [request.handle for request in take_all(queue)] == [2, 5, 3, 1, 4]


def test_the_oldest_request_brings_its_priority_s_turn_and_sessions_share_it() -> None:
    # A level for 10 s: 1 and 2 came at 0 s, 3 and 4 with a level less at 15 s.
    queue = make_queue("priority", aging_s=10.0)
    for handle, client, priority, arrival_s in (
        (1, 1, 1, 0.0),
        (2, 1, 1, 0.0),
        (3, 2, 1, 15.0),
        (4, 2, 0, 15.0),
    ):
        request = make_request(handle, [1], 1, client=client, priority=priority)
        request.arrival, request.arrival_s = handle, arrival_s
        queue.push(request)
    assert [request.handle for request in take_all(queue)] == [1, 3, 2, 4]


def test_samples_of_a_prompt_take_turns_with_other_sessions() -> None:
    scheduler, executor = make_scheduler(max_num_seqs=1)
    scheduler.add(make_request(1, [1] * 6, 1, client=1, n=8))
    scheduler.add(make_request(11, [2] * 6, 1, client=2))
    scheduler.add(make_request(12, [2] * 6, 1, client=2))
    assert order_of_admissions(scheduler, executor) == [1, 11, 2, 12, 3, 4, 5, 6, 7, 8]


def test_sessions_that_come_and_go_behind_a_head_leave_nothing_behind() -> None:
    queue = make_queue()
    head = make_request(0, [1], 1, client=0)
    queue.push(head)
    for handle in range(1, 2000):
        request = make_request(handle, [1], 1, client=handle)
        queue.push(request)
        assert queue.head() is head
        queue.remove(request)
    (level,) = queue._levels.values()
    assert len(level._fairness) < 100
    assert len(level._order) < 100
    assert len(level._listed) < 100
    queue.remove(head)
    assert not queue._levels
    assert queue.head() is None


def test_debts_are_kept_until_their_round_and_not_longer() -> None:
    turns = DeficitRoundRobin(QUANTUM)
    for client, num_tokens in ((1, 8), (2, 80), (3, 16)):
        turns.enter(client)
        turns.charge(client, num_tokens)
        turns.leave(client)
    for number in range(1, 12):
        turns.advance_to((number, 0))
        for client, paid in ((1, 1), (2, 10), (3, 2)):
            turns.enter(client)
            assert turns.of(client)[0] == max(paid, number)
            turns.leave(client)


Event = tuple[str, int, int]
EVENTS = st.lists(
    st.tuples(st.sampled_from(["push", "push", "admit", "remove"]), st.integers(1, 5),
              st.sampled_from([1, 7, 8, 9, 24, 100])),
    max_size=120,
)  # fmt: skip


def replay(events: list[Event]) -> list[int]:
    """What a queue admits, held to the bound of `FairnessWatch`; the rest at the end."""
    queue, watch = make_queue(), FairnessWatch(QUANTUM)
    waiting: dict[int, deque[Request]] = {client: deque() for client in range(1, 6)}
    order: list[int] = []

    def admit() -> None:
        head = queue.head()
        assert head is not None
        own = waiting[head.client]
        assert own.popleft() is head, "a session's requests keep their order"
        queue.admit(head, head.num_tokens)
        watch.admitted(head.client, head.num_tokens, has_more=bool(own))
        order.append(head.handle)

    for handle, (what, client, length) in enumerate(events, 1):
        before = queue.head()
        if what == "push":
            request = make_request(handle, [1] * length, 1, client=client)
            waiting[client].append(request)
            queue.push(request)
            assert queue.head() is (before or request), "the head stays"
        elif what == "remove" and waiting[client]:
            request = waiting[client].pop()
            queue.remove(request)
            assert request is before or queue.head() is before
        elif what == "admit" and len(queue):
            admit()
        assert len(queue) == sum(map(len, waiting.values()))
        watch.waits(client for client, own in waiting.items() if own)
    while len(queue):
        admit()
    assert not queue._levels
    return order


@settings(max_examples=examples(300), deadline=None)
@given(EVENTS)
def test_nobody_is_given_more_than_the_bound_while_another_one_waits(events: list[Event]) -> None:
    assert replay(events) == replay(events)


def test_a_crowd_of_sessions_is_seen_through() -> None:
    scheduler, executor = make_scheduler(max_num_seqs=3)
    for handle in range(1, 61):
        scheduler.add(make_request(handle, [handle % 50] * (1 + handle % 9), 3, client=handle % 7))
    assert len(run(scheduler, executor).finish_reasons) == 60
