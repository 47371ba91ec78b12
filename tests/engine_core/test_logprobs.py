"""Log probabilities from a step's result to the client, whatever becomes of their tokens."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import msgspec
import numpy as np
import pytest

from nanocore.engine_core.io.session import output_frames
from nanocore.engine_core.scheduling.columns import LogprobColumns, TokenColumns
from nanocore.engine_core.scheduling.outputs import ClientOutput
from nanocore.engine_core.scheduling.scheduler import Scheduler
from nanocore.protocol.codec import client_decoder
from nanocore.protocol.messages import Event, Output, TokenLogprobs
from nanocore.worker.plan import ModelRunnerOutput
from tests.engine_core.scheduler_checks import Engine, run
from tests.fakes import (
    VOCAB_SIZE,
    Deliveries,
    LogprobEntry,
    PipelinedExecutor,
    entries_of,
    expected_logprobs,
    expected_tokens,
    logprob_entry,
    make_request,
    make_scheduler,
    row_logprobs,
)

PROMPT = [*range(20, 31)]  # 11 tokens: 2 full blocks of 4, and 3 tokens


def of_prompt(prompt: list[int], num: int) -> list[LogprobEntry]:
    return expected_logprobs(prompt[:1], prompt[1:], num)


def columns(entries: list[tuple[int, LogprobEntry]]) -> LogprobColumns:
    said = row_logprobs(entries)
    assert said is not None
    return LogprobColumns.of_rows(said)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_each_token_comes_with_its_own_and_who_asked_for_none_gets_none(depth: int) -> None:
    scheduler, executor = make_scheduler()
    asked = {1: 2, 2: None, 3: 0, 4: -1}
    for handle, num in asked.items():
        request = make_request(handle, [handle] * 5, 6, client=handle % 2, logprobs=num)
        scheduler.add(request)
    deliveries = run(scheduler, executor, depth)
    assert deliveries.logprobs == {
        handle: expected_logprobs([handle] * 5, expected_tokens([handle] * 5, 6), num)
        for handle, num in asked.items()
        if num is not None
    }
    assert len(deliveries.logprobs[4][0][1]) == 1 + VOCAB_SIZE


def test_a_request_that_asks_for_its_prompts_reads_no_cached_prefix_and_others_do() -> None:
    scheduler, executor = make_scheduler()
    scheduler.add(make_request(1, PROMPT, 2))
    before = Deliveries()
    while scheduler.num_requests:
        before.step(scheduler, executor)
    assert scheduler.kv_cache.num_cached_blocks > 0
    scheduler.add(make_request(2, PROMPT, 2, prompt_logprobs=1))
    scheduler.add(make_request(3, PROMPT, 2, prompt_logprobs=1, skip_reading_prefix_cache=True))
    scheduler.add(make_request(4, PROMPT, 2))
    deliveries = run(scheduler, executor)
    assert deliveries.num_cached == {2: 0, 3: 0, 4: 8}
    assert deliveries.prompt_logprobs == dict.fromkeys((2, 3), of_prompt(PROMPT, 1))


def test_after_a_preemption_a_prompt_goes_on_where_its_delivered_entries_end() -> None:
    """Nothing twice, nothing lost: cached blocks are read as far as the entries go."""
    engine = Engine(num_blocks=9, max_num_seqs=4, long_prefill_token_threshold=1)
    prompt = [*range(24)]
    known: list[tuple[int, int]] = []
    engine.add(1, [5] * 6, 24)
    engine.step()
    engine.add(2, prompt, 2, prompt_logprobs=1, logprobs=1)
    while engine.scheduler.num_requests:
        added = engine.step().added
        known += [(new.num_prompt_logprobs, new.num_computed_tokens)
                  for new in added if new.num_prompt_tokens == 24]  # fmt: skip
    assert len(known) > 1, "it was preempted"
    assert known[0] == (0, 0)
    assert known[1][0] > 4, "in its prompt, after some were delivered"
    for num_logprobs, num_computed in known:
        assert num_computed <= num_logprobs
    assert any(num_computed > 0 for _, num_computed in known)
    assert all(earlier[0] <= later[0] for earlier, later in pairwise(known))
    assert engine.deliveries.prompt_logprobs == {2: of_prompt(prompt, 1)}
    assert engine.deliveries.logprobs == {
        2: expected_logprobs(prompt, expected_tokens(prompt, 2), 1)
    }


def test_a_request_preempted_after_its_prompt_reads_the_cache_again() -> None:
    engine = Engine(num_blocks=9, max_num_seqs=4)
    for handle in (1, 2):
        engine.add(handle, [handle] * 9, 16, prompt_logprobs=0, logprobs=0)
    resumed = []
    while engine.scheduler.num_requests:
        plan = engine.step()
        resumed += [(new.num_prompt_logprobs, new.num_computed_tokens) for new in plan.added]
    assert len(resumed) > 2
    assert resumed[-1][0] == 8
    assert resumed[-1][1] >= 8
    for handle in (1, 2):
        prompt = [handle] * 9
        assert engine.deliveries.prompt_logprobs[handle] == of_prompt(prompt, 0)
        assert len(engine.deliveries.logprobs[handle]) == 16


def in_flight(**sampling: Any) -> tuple[Scheduler, ModelRunnerOutput]:
    """Two requests' prompts in one step, the first of which asks; and its right result."""
    scheduler, executor = make_scheduler()
    scheduler.add(make_request(1, PROMPT, 5, **sampling))
    scheduler.add(make_request(2, [7] * 5, 5))
    return scheduler, executor.execute(scheduler.schedule())


ENTRY = logprob_entry([1], 2, 1)
TWO = row_logprobs([(0, ENTRY), (0, ENTRY)])
assert TWO is not None


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (None, r"of tokens of rows \[\]: they must be of \[0\]"),
        (row_logprobs([(1, ENTRY)]), r"rows \[1\]: they must be of \[0\]"),
        (row_logprobs([(0, ENTRY), (1, ENTRY)]), r"rows \[0, 1\]: they must be of \[0\]"),
        (row_logprobs([(0, ENTRY), (5, ENTRY)]), r"rows \[0, 5\]"),
        (TWO, r"rows \[0, 0\]: they must be of \[0\]"),
        (row_logprobs([(0, (1, []))]), "do not fit together"),
        (msgspec.structs.replace(TWO, ranks=b""), "do not fit together"),
        (msgspec.structs.replace(TWO, rows=b""), "do not fit together"),
        (msgspec.structs.replace(TWO, token_ids=b""), "do not fit together"),
        (msgspec.structs.replace(TWO, logprobs=bytes(4)), "do not fit together"),
        (msgspec.structs.replace(TWO, counts=bytes(8)), "do not fit together"),
    ],
)
def test_a_result_whose_log_probabilities_do_not_fit_is_refused(
    wrong: object, message: str
) -> None:
    scheduler, result = in_flight(logprobs=1)
    with pytest.raises(ValueError, match=message):
        scheduler.update(msgspec.structs.replace(result, logprobs=wrong))


def test_log_probabilities_that_nobody_asked_for_are_refused() -> None:
    scheduler, result = in_flight()
    with pytest.raises(ValueError, match=r"rows \[0\]: they must be of \[\]"):
        scheduler.update(msgspec.structs.replace(result, logprobs=row_logprobs([(0, ENTRY)])))
    scheduler, result = in_flight()
    wrong = msgspec.structs.replace(result, prompt_logprobs=row_logprobs([(0, ENTRY)]))
    with pytest.raises(ValueError, match=r"\{0: 1\}: it must have \{\}"):
        scheduler.update(wrong)


@pytest.mark.parametrize("counts", [{}, {0: 9}, {0: 11}, {0: 10, 1: 1}])
def test_a_result_without_a_chunks_entries_or_with_others_is_refused(
    counts: dict[int, int],
) -> None:
    scheduler, result = in_flight(prompt_logprobs=1)
    entries = [(row, ENTRY) for row, count in counts.items() for _ in range(count)]
    with pytest.raises(ValueError, match=r"it must have \{0: 10\}"):
        scheduler.update(msgspec.structs.replace(result, prompt_logprobs=row_logprobs(entries)))


def test_rows_entries_may_come_in_any_order() -> None:
    engine = Engine()
    for handle in (1, 2):
        engine.add(handle, [handle] * 3, 5, logprobs=1)
    result = engine.executor.execute(engine.scheduler.schedule())
    assert result.logprobs is not None
    entries = entries_of(LogprobColumns.of_rows(result.logprobs))
    turned = msgspec.structs.replace(result, logprobs=row_logprobs(entries[::-1]))
    engine.deliveries.take(engine.scheduler, turned)
    assert engine.deliveries.logprobs == {1: [entries[0][1]], 2: [entries[1][1]]}


# What travels.


def output(num_tokens: dict[int, int], asking: set[int], num: int) -> ClientOutput:
    """So many tokens of each handle, 0, 1, ...; the prompts of those that ask are as long."""
    owners = np.array([*num_tokens], np.uint32)
    token_ids = np.array([i for count in num_tokens.values() for i in range(count)], np.int32)
    entries = [
        (handle, logprob_entry([handle] * (i + 1), i, num))
        for handle, count in num_tokens.items()
        if handle in asking
        for i in range(count)
    ]
    counts = np.array([*num_tokens.values()])
    tokens = TokenColumns(owners, token_ids, counts, columns(entries) if entries else None)
    events = [Event(handle=1, num_cached_tokens=0), Event(handle=2, finish_reason="length")]
    return ClientOutput(1, tokens, events, columns(entries[::-1]) if entries else None)


def read(frames: list[bytes]) -> Output:
    message = client_decoder().decode(frames)
    assert isinstance(message, Output)
    return message


def entries_on_wire(said: TokenLogprobs | None) -> list[tuple[int, LogprobEntry]]:
    if said is None:
        return []
    return entries_of(
        LogprobColumns(
            np.frombuffer(said.handles, "<u4"),
            np.frombuffer(said.ranks, "<u4"),
            np.frombuffer(said.counts, "<u4"),
            np.frombuffer(said.token_ids, "<i4"),
            np.frombuffer(said.logprobs, "<f4"),
        )
    )


def test_an_output_without_log_probabilities_pays_no_byte() -> None:
    (frames,) = output_frames(output({1: 1, 2: 1}, set(), 0))
    assert b"logprobs" not in frames[1]


@pytest.mark.parametrize("max_bytes", [1, 50, 100, 10_000])
def test_what_would_be_too_long_a_frame_is_cut_token_by_token(max_bytes: int) -> None:
    whole = output({3: 2, 1: 1, 2: 4}, {3, 2}, 2)
    messages = [read(frames) for frames in output_frames(whole, max_bytes)]
    assert (len(messages) > 1) == (max_bytes < 10_000)
    tokens: list[tuple[int, int]] = []
    said: list[tuple[int, LogprobEntry]] = []
    of_prompts: list[tuple[int, LogprobEntry]] = []
    for message in messages:
        handles = np.frombuffer(message.handles, "<u4")
        counts = 1 if message.counts is None else np.frombuffer(message.counts, "<u4")
        owners = np.repeat(handles, counts).tolist()
        own = entries_on_wire(message.logprobs)
        assert [handle for handle, _ in own] == [handle for handle in owners if handle != 1]
        assert len(own) * (12 + 3 * 8) <= max_bytes + 12 + 3 * 8
        tokens += zip(owners, np.frombuffer(message.tokens, "<i4").tolist(), strict=True)
        said += own
        prompts = entries_on_wire(message.prompt_logprobs)
        if prompts and len(messages) > 1:
            assert not tokens, "after a token"
        of_prompts += prompts
    assert tokens == [(3, 0), (3, 1), (1, 0), (2, 0), (2, 1), (2, 2), (2, 3)]
    assert whole.tokens.logprobs is not None
    assert whole.prompt_logprobs is not None
    assert said == entries_of(whole.tokens.logprobs)
    assert of_prompts == entries_of(whole.prompt_logprobs)
    assert [event.handle for message in messages for event in message.events] == [1, 2]
    assert messages[-1].events[-1].finish_reason == "length"


def test_entries_in_another_order_than_the_tokens_go_with_their_own() -> None:
    whole = output({3: 2, 1: 1, 2: 2}, {1, 2, 3}, 0)
    assert whole.tokens.logprobs is not None
    whole.tokens.logprobs = whole.tokens.logprobs.take(np.array([3, 0, 4, 1, 2]))
    for frames in output_frames(whole, 1):
        message = read(frames)
        for handle, (_, candidates) in entries_on_wire(message.logprobs):
            assert [handle] == np.frombuffer(message.handles, "<u4").tolist()
            assert [candidates[0][0]] == np.frombuffer(message.tokens, "<i4").tolist()


@pytest.mark.parametrize("num_groups", [1, 2])
def test_prompts_are_computed_in_slices_of_so_many_logprobs(num_groups: int) -> None:
    scheduler, executor = make_scheduler(max_prompt_logprobs=30, num_groups=num_groups)
    worker, deliveries = PipelinedExecutor(executor), Deliveries()
    prompts = {1: list(range(20)), 2: [7] * 9, 3: [8] * 12, 4: [9] * 3}
    numbers = {1: 39, 2: 5, 3: None, 4: 2}  # those of 1 are above the limit, for each token
    for handle, prompt in prompts.items():
        scheduler.add(make_request(handle, prompt, 2, prompt_logprobs=numbers[handle]))
    most_told = 0
    while scheduler.num_requests:
        while (group := scheduler.next_group()) is not None and len(worker) < num_groups:
            worker.submit(scheduler.schedule(group))
            plan = scheduler.planned
            told = [(chunk.num_tokens, numbers[scheduler.running.request(chunk.row).handle])
                    for chunk in plan.chunks]  # fmt: skip
            told = [(count, 1 + number) for count, number in told if number is not None]
            num_told = sum(count * number for count, number in told)
            # Whoever waits is given a row, and a token, all the same.
            assert num_told <= 30 or {count for count, _ in told} == {1}
            most_told = max(most_told, num_told if len(told) > 1 else 0)
        deliveries.take(scheduler, worker.collect())
    assert most_told > 0, "several share a step"
    for handle, prompt in prompts.items():
        number = numbers[handle]
        expected = [] if number is None else expected_logprobs(prompt[:1], prompt[1:], number)
        assert deliveries.prompt_logprobs.get(handle, []) == expected
        assert deliveries.tokens[handle] == expected_tokens(prompt, 2)
