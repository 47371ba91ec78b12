"""Steps of which a row has none to several tokens, and log probabilities of each token.

The worker computes drafts after a row's last token and accepts some of them, in its own words.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

from nanocore.engine_core.io.session import Backlog, TokenLog, output_frames
from nanocore.engine_core.scheduling.columns import LogprobColumns, TokenColumns
from nanocore.engine_core.scheduling.outputs import ClientOutput
from nanocore.engine_core.scheduling.scheduler import Scheduler
from nanocore.kv_cache.block_key import KeyChain
from nanocore.protocol.codec import client_decoder, unpack_output
from nanocore.protocol.messages import Event, Output
from nanocore.worker.plan import NO_TOKEN, ModelRunnerOutput, SchedulerOutput
from tests.engine_core import scheduler_checks
from tests.engine_core.scheduler_checks import check_blocks
from tests.fakes import (
    FakeExecutor,
    FakeProposer,
    LogprobEntry,
    entries_of,
    expected_logprobs,
    expected_tokens,
    make_request,
    next_token,
    row_logprobs,
    tokens_by_handle,
)

PROMPT = [3, 1, 4, 1, 5]
TOKENS = expected_tokens(PROMPT, 20)


def column(values: list[int]) -> bytes:
    return np.array(values, "<i4").tobytes()


def logprobs_of(prompt: list[int], num_tokens: int, num: int = 2) -> list[LogprobEntry]:
    """What is said of the first tokens after a prompt."""
    return expected_logprobs(prompt, expected_tokens(prompt, num_tokens), num)


class Engine(scheduler_checks.Engine):
    """A scheduler, and a worker all of whose drafts are right."""

    def __init__(self, num_drafts: int = 3, **limits: Any) -> None:
        super().__init__(num_speculative_tokens=num_drafts, **limits)
        self.executor.draft = next_token


def test_a_step_computes_a_rows_token_and_its_drafts_and_delivers_what_was_right() -> None:
    engine = Engine(num_drafts=3)
    engine.add(1, PROMPT, 20)
    assert engine.step().num_tokens == 5
    plan = engine.step()
    assert (plan.chunk_rows, plan.chunk_counts) == (column([0]), column([4]))
    assert engine.tokens[1] == TOKENS[: 1 + 4]
    assert engine.scheduler.counters.generation_tokens == 5
    engine.finish()
    assert engine.tokens[1] == TOKENS
    assert engine.scheduler.counters.generation_tokens == 20


def test_wrong_drafts_are_taken_back_and_their_blocks_stay_held() -> None:
    engine = Engine(num_drafts=3, block_size=4, enable_prefix_caching=True)
    engine.executor.draft = lambda context: next_token(context) + 1
    scheduler = engine.scheduler
    scheduler.add(make_request(1, PROMPT, 20))
    engine.step()
    assert engine.step().num_tokens == 4
    assert scheduler.running.num_computed[0] == 6  # of 7 known; 5 + 4 were computed
    assert len(scheduler.kv_cache.block_ids(1)) == 3
    engine.finish()
    assert engine.tokens[1] == TOKENS


def test_a_row_of_which_nothing_was_accepted_computes_its_token_again() -> None:
    engine = Engine(num_drafts=2)
    engine.executor.withhold = lambda context, step: 99 if step == 2 else 0
    engine.add(1, PROMPT, 20)
    engine.step()
    assert engine.step().num_tokens == 3
    assert engine.tokens[1] == TOKENS[:1]
    assert engine.step().num_tokens == 3
    assert engine.tokens[1] == TOKENS[:4]


@pytest.mark.parametrize("max_tokens", range(1, 9))
def test_drafts_never_pass_the_requests_length(max_tokens: int) -> None:
    engine = Engine(num_drafts=3)
    engine.add(1, PROMPT, max_tokens)
    engine.finish()
    assert engine.tokens[1] == TOKENS[:max_tokens]
    assert engine.finish_reasons == {1: "length"}
    assert engine.executor.num_tokens == len(PROMPT) + max_tokens - 1


@pytest.mark.parametrize("as_eos", [True, False])
def test_what_follows_a_stop_in_the_middle_of_a_step_is_not_delivered(as_eos: bool) -> None:
    """Of 4 tokens of a row the 2nd ends it; its client's other row and another client's go on."""
    stop = TOKENS[2]
    assert stop not in TOKENS[:2]
    engine = Engine(num_drafts=3)
    scheduler = engine.scheduler
    stops = {"eos": (stop,)} if as_eos else {"stop_token_ids": (stop,)}
    others = {2: [7] * 5, 3: [8] * 6}
    asked = {"logprobs": 2}
    scheduler.add(make_request(1, PROMPT, 20, client=1, **stops, **asked))  # type: ignore[arg-type]
    scheduler.add(make_request(2, others[2], 20, client=1, **asked))
    scheduler.add(make_request(3, others[3], 20, client=2, **asked))
    engine.step()
    outputs = scheduler.update(engine.executor.execute(scheduler.schedule()))
    expected = {handle: expected_tokens(prompt, 5)[1:] for handle, prompt in others.items()}
    first, second = outputs
    assert tokens_by_handle(first.tokens) == {1: TOKENS[1:3], 2: expected[2]}
    assert first.tokens.counts is not None
    assert first.tokens.counts.tolist() == [2, 4]
    assert first.tokens.logprobs is not None
    assert entries_of(first.tokens.logprobs) == [
        *((1, entry) for entry in logprobs_of(PROMPT, 3)[1:]),
        *((2, entry) for entry in logprobs_of(others[2], 5)[1:]),
    ]
    assert [(event.handle, event.finish_reason) for event in first.events] == [(1, "stop")]
    assert tokens_by_handle(second.tokens) == {3: expected[3]}
    assert second.tokens.logprobs is not None
    assert second.tokens.logprobs.owners.tolist() == [3] * 4
    assert scheduler.counters.generation_tokens == 3 + 2 + 4 + 4
    check_blocks(scheduler)


def test_tokens_before_one_that_is_not_there_are_delivered_and_the_request_ends() -> None:
    engine = Engine(num_drafts=3)
    engine.executor.sample = lambda context: (
        NO_TOKEN if context[0] == 3 and len(context) == 7 else next_token(context)
    )
    engine.add(1, PROMPT, 20, logprobs=2)
    engine.add(2, [7] * 5, 20)
    engine.finish()
    assert engine.tokens == {1: TOKENS[:2], 2: expected_tokens([7] * 5, 20)}
    assert engine.finish_reasons == {1: "error", 2: "length"}
    assert "output token 3 " in engine.deliveries.messages[1]
    assert engine.deliveries.logprobs == {1: logprobs_of(PROMPT, 2)}


def test_kv_of_wrong_drafts_is_never_found_and_that_of_right_ones_is() -> None:
    engine = Engine(num_drafts=3, block_size=4, enable_prefix_caching=True)
    engine.executor.draft = lambda context: next_token(context) + (len(context) % 3 == 0)
    prompt = [*PROMPT, 9]
    tokens = expected_tokens(prompt, 20)
    engine.add(1, prompt, 20, stop_token_ids=(tokens[9],))
    engine.run()
    assert engine.tokens[1] == tokens[:10]
    # 16 tokens are known, and the last one's KV is not computed: 3 blocks of 4 are whole.
    engine.add(2, [*prompt, *tokens[:15]], 3)
    engine.finish()  # whose worker refuses wrong KV
    assert engine.deliveries.num_cached[2] == 12
    assert engine.tokens[2] == tokens[15:18]


def test_with_drafts_a_step_waits_for_the_result_of_the_one_before() -> None:
    engine = Engine(num_drafts=1)
    engine.add(1, PROMPT, 20)
    assert engine.scheduler.next_group() == 0
    engine.scheduler.schedule()
    assert engine.scheduler.next_group() is None
    with pytest.raises(AssertionError, match="step 2 of group 0"):
        engine.scheduler.schedule()


def test_earlier_stages_are_told_every_token_with_its_row() -> None:
    engine = Engine(num_drafts=3, num_groups=2)
    scheduler = engine.scheduler
    scheduler.add(make_request(1, PROMPT, 20))
    for _ in range(2):
        engine.deliveries.take(scheduler, engine.executor.execute(scheduler.schedule(0)))
    plan = scheduler.schedule(0)
    assert plan.sampled_rows == column([0] * 4)
    assert plan.sampled_token_ids == column(TOKENS[1:5])


def test_a_steps_cost_is_known_with_its_drafts_before_and_after_it_is_planned() -> None:
    engine = Engine(num_drafts=2, target_itl_ms=50.0)
    engine.add(1, PROMPT, 20)
    engine.step()
    running = engine.scheduler.running
    assert running.decode_load(0) == (1, 6)  # drafts get what is left when that is served
    engine.step()
    plan = engine.scheduler.completed.plan
    assert (plan.num_tokens, plan.context) == (3, 6 + 7 + 8)


def test_drafts_get_what_prompts_leave_of_the_budget() -> None:
    engine = Engine(num_drafts=3, max_num_seqs=4, max_num_batched_tokens=8)
    engine.add(1, PROMPT, 20)
    engine.step()
    engine.add(2, [9, 2, 6, 5, 3], 20)
    engine.step()
    plan = engine.scheduler.completed.plan
    assert (plan.num_prefill_tokens, plan.num_decode_tokens) == (len(PROMPT), 8 - len(PROMPT))
    engine.step()
    plan = engine.scheduler.completed.plan
    assert plan.decode_counts is not None
    assert plan.decode_counts.tolist() == [4, 4]


def test_nobody_is_preempted_and_no_last_block_is_taken_for_a_draft() -> None:
    engine = Engine(num_drafts=8, block_size=4, num_blocks=3)
    engine.add(1, PROMPT[:4], 8)
    engine.step()
    engine.step()
    plan = engine.scheduler.completed.plan
    # Its second block has room for four tokens; the third would be the last one.
    assert plan.decode_counts is not None
    assert plan.decode_counts.tolist() == [4]


def after_a_prompt(num_drafts: int) -> tuple[Scheduler, FakeExecutor, SchedulerOutput]:
    """A scheduler with a plan in flight of one row that decodes."""
    engine = Engine(num_drafts=num_drafts)
    engine.add(1, PROMPT, 20)
    engine.step()
    return engine.scheduler, engine.executor, engine.scheduler.schedule()


@pytest.mark.parametrize(
    ("num_drafts", "changes", "message"),
    [
        (0, {"counts": column([2]), "token_ids": column([1, 2])}, "2 tokens for row 0: at most 1"),
        (2, {"counts": column([4]), "token_ids": column([1] * 4)}, "4 tokens for row 0: at most 3"),
        (2, {"counts": column([2]), "token_ids": column([1])}, "does not fit together"),
        (
            2,
            {"counts": column([1, 1]), "token_ids": column([1, 1])},
            "1 rows of 2 tokens, 2 counts",
        ),
        (2, {"counts": column([-1])}, "does not fit together"),
        (0, {"token_ids": column([1, 1])}, "does not fit together"),
        (0, {"rows": b""}, r"no token for rows that sample: \[0\]"),
        (0, {"counts": column([0])}, r"no token for rows that sample: \[0\]"),
        (0, {"rows": column([4]), "token_ids": column([1])}, r"do not sample: \[4\]"),
        (0, {"rows": column([-1]), "token_ids": column([1])}, r"do not sample: \[-1\]"),
        (2, {"rows": column([-8]), "token_ids": column([1])}, r"do not sample: \[-8\]"),
        (2, {"rows": column([0, 99]), "token_ids": column([1, 1])}, r"do not sample: \[99\]"),
        *(
            (n, {"rows": column([0, 0]), "token_ids": column([1, 1])}, r"rows twice: \[0\]")
            for n in (0, 2)
        ),
    ],
)
def test_a_result_that_does_not_fit_its_step_is_refused(
    num_drafts: int, changes: dict[str, object], message: str
) -> None:
    scheduler, _, _ = after_a_prompt(num_drafts)
    result = ModelRunnerOutput(rows=column([0]), token_ids=b"")
    with pytest.raises(ValueError, match=message):
        scheduler.update(msgspec.structs.replace(result, **changes))


def test_a_prompt_of_which_a_part_is_computed_has_no_token() -> None:
    engine = Engine(num_drafts=0, max_num_seqs=3, max_num_batched_tokens=3)
    engine.add(1, PROMPT, 20)
    engine.scheduler.schedule()
    with pytest.raises(ValueError, match=r"rows that do not sample: \[0\]"):
        engine.scheduler.update(ModelRunnerOutput(rows=column([0]), token_ids=column([1])))


def test_rows_may_come_in_any_order() -> None:
    engine = Engine(num_drafts=0)
    for handle in (1, 2, 3):
        engine.add(handle, PROMPT, 20)
    engine.scheduler.schedule()
    result = ModelRunnerOutput(rows=column([2, 0, 1]), token_ids=column([9, 7, 8]))
    engine.deliveries.take(engine.scheduler, result)
    assert engine.tokens == {1: [7], 2: [8], 3: [9]}


def test_a_prompt_that_is_complete_has_a_token() -> None:
    engine = Engine(num_drafts=2)
    engine.add(1, PROMPT, 20)
    engine.scheduler.schedule()
    with pytest.raises(ValueError, match=r"no token for rows that sample: \[0\]"):
        engine.scheduler.update(ModelRunnerOutput(rows=b"", token_ids=b""))


def output(
    tokens: dict[int, list[int]], logprobs: dict[int, list[LogprobEntry]] | None = None
) -> ClientOutput:
    """logprobs: of which tokens, as `entries_of` has them."""
    counts = [len(ids) for ids in tokens.values()]
    said = TokenColumns(
        np.array(list(tokens), np.uint32),
        np.array([token for ids in tokens.values() for token in ids], np.int32),
        counts=np.array(counts),
        logprobs=None,
    )
    entries = [(handle, one) for handle, own in (logprobs or {}).items() for one in own]
    if (of_rows := row_logprobs(entries)) is not None:
        said.logprobs = LogprobColumns.of_rows(of_rows)
    return ClientOutput(1, said)


def sent(frames: list[bytes]) -> tuple[list[int], list[int] | None, list[int]]:
    """(handles, counts, tokens) of an OUTPUT."""
    message = client_decoder().decode(frames)
    assert isinstance(message, Output)
    handles, counts, token_ids = unpack_output(message)
    return list(handles), None if counts is None else list(counts), list(token_ids)


def test_counts_are_on_the_wire_only_where_a_request_has_several_tokens() -> None:
    (frames,) = output_frames(output({7: [1], 9: [2]}))
    assert sent(frames) == ([7, 9], None, [1, 2])
    (frames,) = output_frames(output({7: [1, 5], 9: [2]}))
    assert sent(frames) == ([7, 9], [2, 1], [1, 5, 2])


def test_a_merged_output_says_no_counts_where_all_are_one() -> None:
    backlog = Backlog(client=1, since_s=0.0)
    backlog.add(output({9: [1]}))
    backlog.add(output({7: [2]}))
    frames = backlog.next()
    assert frames is not None
    assert sent(frames) == ([9, 7], None, [1, 2])


def test_a_backlog_merges_steps_with_one_and_with_several_tokens() -> None:
    a, b, c, d = expected_logprobs([1], [9, 8, 7, 6], 3)
    ended = output({7: [9]}, {7: [d]})
    ended.events.append(Event(handle=7, finish_reason="stop"))
    steps = [
        output({9: [1], 7: [2]}),
        output({7: [3, 4], 9: [5]}, {9: [a], 7: [b, c]}),
        output({8: [6, 7, 8]}),
        ended,
    ]
    log, backlog = TokenLog(), Backlog(client=1, since_s=0.0)
    for step in steps:
        log.add(step.tokens)
        backlog.add(step)
    merged = log.merged()
    assert tokens_by_handle(merged) == {9: [1, 5], 7: [2, 3, 4, 9], 8: [6, 7, 8]}
    assert merged.logprobs is not None
    assert entries_of(merged.logprobs) == [(9, a), (7, b), (7, c), (7, d)]
    frames = backlog.next()
    assert frames is not None
    message = client_decoder().decode(frames)
    assert isinstance(message, Output)
    assert [event.handle for event in message.events] == [7]
    assert sent(frames) == ([9, 7, 8], [2, 4, 3], [1, 5, 2, 3, 4, 9, 6, 7, 8])
    backlog.drop_next()
    assert backlog.next() is None


def test_drafts_are_counted_with_those_that_were_right_by_their_place() -> None:
    engine = Engine(num_drafts=3)
    engine.executor.draft = lambda context: next_token(context) + (len(context) == len(PROMPT) + 3)
    engine.add(1, PROMPT, 20)
    engine.step()
    engine.step()  # of three drafts the third is wrong
    engine.step()
    assert engine.tokens[1] == TOKENS[: 1 + 3 + 4]
    counters = engine.scheduler.draft_counters
    assert (counters.num_drafts, counters.num_draft_tokens) == (2, 6)
    assert counters.num_accepted_tokens == 5
    assert counters.accepted_per_pos == [2, 2, 1]


class ListeningProposer(FakeProposer):
    """Records what it is told of rows."""

    def __init__(self, token_ids: NDArray[np.int32]) -> None:
        super().__init__(token_ids)
        self.begun: list[tuple[int, Hashable]] = []
        self.ended: list[tuple[int, list[int], bool]] = []

    def begin(self, row: int, salt: Hashable) -> None:
        self.begun.append((row, salt))

    def end(self, row: int, num_prompt: int, num_tokens: int, has_finished: bool) -> None:
        outputs = self._token_ids[row, num_prompt:num_tokens].tolist()
        self.ended.append((row, outputs, has_finished))


def test_a_proposer_follows_rows_and_their_salts_and_gets_what_finished() -> None:
    heard: list[ListeningProposer] = []

    def make(token_ids: NDArray[np.int32]) -> ListeningProposer:
        heard.append(ListeningProposer(token_ids))
        return heard[0]

    engine = scheduler_checks.Engine(num_speculative_tokens=3, proposer=make)
    for handle, salt in ((1, "a"), (2, "b"), (3, "a")):
        request = make_request(handle, PROMPT, 6)
        request.key_chain = KeyChain(4, {"cache_salt": salt})
        request.key_chain.extend(np.array(PROMPT, "<i4").tobytes())
        engine.scheduler.add(request)
    engine.step()
    (proposer,) = heard
    rows, salts = zip(*proposer.begun, strict=True)
    assert rows == (0, 1, 2)
    assert salts[0] == salts[2] != salts[1]
    preempted = engine.scheduler.running.request(2)
    engine.scheduler.running.preempt(preempted)
    assert [(row, has_finished) for row, _, has_finished in proposer.ended] == [(2, False)]
    engine.scheduler.waiting.push(preempted)
    engine.finish()
    assert len(proposer.begun) == 4
    assert proposer.ended[1:] == [(row, TOKENS[:6], True) for row, *_ in proposer.ended[1:]]
    assert sorted(row for row, *_ in proposer.ended[1:]) == [0, 1, 2]


@pytest.mark.parametrize("num_tokens", range(1, 12))
def test_what_a_request_computed_is_found_to_its_last_block_be_its_last_tokens_drafts(
    num_tokens: int,
) -> None:
    engine = Engine(num_drafts=3, block_size=4)
    engine.add(1, PROMPT, num_tokens)
    engine.run()
    text = [*PROMPT, *engine.tokens[1]]
    engine.add(2, [*text, 1], 1)
    (new,) = engine.step().added
    assert new.num_computed_tokens == (len(text) - 1) // 4 * 4  # the last one was not computed
