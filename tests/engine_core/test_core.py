"""The step loop with a fake worker: what goes in by the inbox comes out by the outbox."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from nanocore.engine_core.log.trace import StepTrace
from nanocore.engine_core.mailbox import (
    AbortRequests,
    AddRequest,
    ControlCall,
    ControlReply,
    Shutdown,
)
from nanocore.engine_core.step_clock import StepClock
from nanocore.kv_cache.events import AllBlocksCleared, BlockStored, KVEventBatch
from nanocore.protocol.errors import ConfigError
from tests.engine_core.core_under_test import (
    CoreUnderTest,
    ScriptedInbox,
    ends,
    replies,
    tokens,
    tokens_of,
)
from tests.fakes import expected_tokens, make_request


@pytest.fixture
def core() -> CoreUnderTest:
    return CoreUnderTest()


def test_an_abort_that_arrives_while_the_model_runs_wins(core: CoreUnderTest) -> None:
    core.during_step = [AbortRequests([1])]
    outputs = core.finish(AddRequest(make_request(1, [1, 2], 1)))
    assert tokens(outputs) == []
    assert [event.finish_reason for event in ends(outputs)] == ["abort"]


def test_a_request_that_overstays_while_the_model_runs_ends_once_and_holds_nothing(
    core: CoreUnderTest,
) -> None:
    core.during_step = [AbortRequests([1, 2], "timeout")]
    requests = [AddRequest(make_request(handle, [1, 2], 9)) for handle in (1, 2, 3)]
    outputs = core.finish(*requests, AbortRequests([3], "abort", "because"))
    assert tokens(outputs) == []
    reasons = {event.handle: (event.finish_reason, event.message) for event in ends(outputs)}
    assert reasons == {1: ("timeout", None), 2: ("timeout", None), 3: ("abort", "because")}
    assert core.scheduler.kv_cache.num_free_blocks == core.scheduler.kv_cache.num_blocks
    assert core.scheduler.counters.num_aborts == 3


def test_a_request_that_arrives_while_the_model_runs_is_kept(core: CoreUnderTest) -> None:
    core.during_step = [AddRequest(make_request(2, [3], 2))]
    outputs = core.finish(AddRequest(make_request(1, [1, 2], 1)))
    assert {event.handle for event in ends(outputs)} == {1, 2}


def test_a_control_operation_that_arrives_while_the_model_runs_waits_for_the_steps_end(
    core: CoreUnderTest,
) -> None:
    # The aborted request's blocks are free only when the step that may write them is over.
    core.during_step = [AbortRequests([1]), ControlCall(1, 1, "reset_prefix_cache")]
    outputs = core.finish(AddRequest(make_request(1, [1] * 9, 5)))
    (reply,) = replies(outputs)
    assert reply.ok
    assert core.scheduler.kv_cache.num_cached_blocks == 0


def test_shutdown_ends_every_request_with_its_reason(core: CoreUnderTest) -> None:
    requests = [AddRequest(make_request(handle, [handle], 50)) for handle in (1, 2)]
    outputs = core.run(*requests)
    assert [(event.handle, event.finish_reason, event.message) for event in ends(outputs)] == [
        (1, "abort", "test"),
        (2, "abort", "test"),
    ]


def test_an_idle_core_looks_for_signals_now_and_then(
    core: CoreUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that came just before the wait would be handled only after it."""
    monkeypatch.setattr("nanocore.engine_core.core.SIGNAL_POLL_S", 1e-3)
    core.core.drain_inbox(wait=True)  # returns, with nothing


def test_stats_count_what_happened(core: CoreUnderTest) -> None:
    core.finish(AddRequest(make_request(1, [1] * 10, 3)))
    core.finish(AddRequest(make_request(2, [1] * 10, 3)))
    outputs = core.run(ControlCall(client=4, call_id=9, operation="stats"))
    (reply,) = [output for output in outputs if isinstance(output, ControlReply)]
    assert (reply.client, reply.reply.call_id) == (4, 9)
    stats = reply.reply.stats
    assert stats is not None
    assert (stats.prompt_tokens, stats.generation_tokens) == (10 + 2, 6)
    assert (stats.prefix_cache_queries, stats.prefix_cache_hits) == (20, 8)
    assert stats.num_free_blocks == stats.num_blocks
    assert stats.num_steps == 6


def test_a_paused_core_takes_requests_and_steps_none(core: CoreUnderTest) -> None:
    outputs = core.run(
        ControlCall(1, 1, "pause"),
        AddRequest(make_request(1, [1], 5)),
        ControlCall(1, 2, "stats"),
    )
    answers = {reply.call_id: reply for reply in replies(outputs)}
    assert answers[2].stats is not None
    assert answers[2].stats.paused
    assert answers[2].stats.num_requests_waiting == 1
    assert tokens(outputs) == []


def test_what_can_never_run_ends_with_an_error_that_says_so(core: CoreUnderTest) -> None:
    # Admission would have refused it: 300 tokens cannot fit 64 blocks of 4.
    request = make_request(1, [1] * 300, 1, max_model_len=400)
    outputs = core.finish(AddRequest(request), AddRequest(make_request(2, [1], 1)))
    failed, finished = ends(outputs)
    assert (failed.handle, failed.finish_reason) == (1, "error")
    assert "300 tokens" in (failed.message or "")
    assert (finished.handle, finished.finish_reason) == (2, "length")


def test_nothing_is_collected_when_no_step_could_begin() -> None:
    core = CoreUnderTest(num_groups=2)
    # As if a row that nobody has waited for blocks: a bug that once made the loop wait for ever.
    core.scheduler.running._stalled.add(7)
    outputs = core.finish(AddRequest(make_request(1, [1], 1)))
    (failed,) = ends(outputs)
    assert (failed.handle, failed.finish_reason) == (1, "error")
    assert "cannot be scheduled" in (failed.message or "")


def test_the_trace_has_one_line_per_step_with_stable_keys(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    trace = StepTrace(str(path))
    core = CoreUnderTest(trace, max_num_batched_tokens=8)
    core.during_step = [AbortRequests([2])]
    core.finish(AddRequest(make_request(1, [1] * 12, 2)), AddRequest(make_request(2, [2], 9)))
    trace.close()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert set(lines[0]) == {
        "step",
        "t_s",
        "duration_ms",
        "scheduled",
        "computed",
        "new",
        "resumed",
        "preempted",
        "finished",
        "cached",
        "num_running",
        "num_waiting",
        "free_blocks",
        "total_blocks",
        "token_budget",
        "arrived",
        "first",
        "sent",
        "preempted_by",
        "blocked",
    }
    assert [line["scheduled"] for line in lines] == [{"r1": 8}, {"r1": 4}, {"r1": 1}]
    assert [line["computed"] for line in lines] == [{"r1": 0}, {"r1": 8}, {"r1": 12}]
    assert [line["finished"] for line in lines] == [["r2"], [], ["r1"]]
    assert lines[0]["new"] == ["r1"]
    assert lines[-1]["free_blocks"] == lines[-1]["total_blocks"] == 64


@pytest.mark.parametrize("kind", ["full disk", "pipe that nobody reads any more"])
def test_a_trace_that_cannot_be_written_is_given_up_and_said_so_once(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, reader = Path("/dev/full"), -1
    if kind != "full disk":
        path = tmp_path / "pipe"
        os.mkfifo(path)
        reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    trace = StepTrace(str(path))
    if reader >= 0:
        os.close(reader)
    core = CoreUnderTest(trace)
    outputs = core.finish(AddRequest(make_request(1, [1, 2], 5)))
    trace.close()
    assert tokens(outputs) == expected_tokens([1, 2], 5)
    (record,) = caplog.records
    assert f"--step-trace {path}: " in record.getMessage()
    assert "the engine continues without it" in record.getMessage()


@pytest.mark.parametrize("kind", ["folder", "in no folder", "pipe without a reader", "no name"])
def test_a_trace_that_cannot_be_opened_is_a_flag_that_cannot_work(
    kind: str, tmp_path: Path
) -> None:
    path = {"folder": tmp_path, "in no folder": tmp_path / "x" / "y", "no name": "a\0b"}.get(kind)
    if path is None:
        path = tmp_path / "pipe"
        os.mkfifo(path)
    with pytest.raises(ConfigError, match=r"--step-trace .*name a file that can be written"):
        StepTrace(str(path))


def test_a_paused_core_sleeps_on_its_inbox_and_runs_when_resumed() -> None:
    script = [
        ControlCall(1, 1, "pause"),
        AddRequest(make_request(1, [1, 2], 5)),
        ControlCall(1, 2, "resume"),  # the core sleeps although a request waits
        Shutdown("test"),  # and again when it has ended
    ]
    outputs = CoreUnderTest(inbox=ScriptedInbox(script)).run()
    assert not script
    assert tokens(outputs) == expected_tokens([1, 2], 5)
    assert [event.finish_reason for event in ends(outputs)] == ["length"]


class NotingSwitch:
    """A dead man's switch that notes how it is used."""

    def __init__(self) -> None:
        self.uses: list[str] = []

    def arm(self) -> None:
        self.uses.append("arm")

    def disarm(self) -> None:
        self.uses.append("disarm")


def test_the_dead_mans_switch_is_armed_in_steps_and_disarmed_before_the_core_sleeps() -> None:
    script = [
        AddRequest(make_request(1, [1, 2], 3)),
        AddRequest(make_request(2, [1, 2], 3)),
        Shutdown("test"),
    ]
    core, switch = CoreUnderTest(inbox=ScriptedInbox(script)), NotingSwitch()
    clock = core.core.clock = StepClock(switch)  # type: ignore[arg-type]
    core.core.run()
    # Three steps each, of which the first one arms it: the others end soon.
    assert switch.uses == ["arm", "disarm", "arm", "disarm"]
    assert clock.age_ms == 0


def test_a_session_resumes_its_own_pause_and_nobody_elses() -> None:
    script = [
        ControlCall(1, 1, "pause"),
        ControlCall(2, 2, "pause"),
        ControlCall(2, 3, "pause"),
        AddRequest(make_request(1, [1, 2], 5)),
        ControlCall(2, 4, "resume"),  # once is enough
        ControlCall(3, 5, "resume"),  # holds none
        ControlCall(1, 6, "stats"),
        ControlCall(1, 7, "resume"),
        ControlCall(1, 8, "resume"),
        Shutdown("test"),  # asked for when the request has ended
    ]
    outputs = CoreUnderTest(inbox=ScriptedInbox(script)).run()
    assert len(ends(outputs)) == 1
    answers = {reply.call_id: reply for reply in replies(outputs)}
    assert all(reply.ok for reply in answers.values())
    assert answers[6].stats is not None
    assert answers[6].stats.paused
    messages = {call_id: reply.message for call_id, reply in answers.items() if reply.message}
    assert messages == dict.fromkeys((4, 5), "still paused by other sessions (1)")


def test_samples_wait_with_their_request_while_it_is_paused_and_end_with_it() -> None:
    request = make_request(1, [1] * 9, 5, n=3)
    script = [
        ControlCall(1, 1, "pause"),
        AddRequest(request),
        ControlCall(1, 2, "stats"),
        AbortRequests([2]),
        ControlCall(1, 3, "stats"),
        AbortRequests([1]),
        ControlCall(1, 4, "stats"),
        ControlCall(1, 5, "resume"),
        Shutdown("test"),
    ]
    outputs = CoreUnderTest(inbox=ScriptedInbox(script)).run()
    waiting = [reply.stats.num_requests_waiting for reply in replies(outputs) if reply.stats]
    assert waiting == [3, 2, 1]
    reasons = [(event.handle, event.finish_reason) for event in ends(outputs)]
    assert reasons == [(2, "abort"), (1, "abort"), (3, "length")]


def test_a_control_operation_that_waited_for_a_step_is_answered_once(core: CoreUnderTest) -> None:
    core.during_step = [ControlCall(1, 1, "stats")]
    outputs = core.finish(AddRequest(make_request(1, [1] * 9, 5)))
    assert [reply.call_id for reply in replies(outputs)] == [1]


def test_kv_events_are_published_with_their_step_and_with_a_reset(core: CoreUnderTest) -> None:
    batches: list[KVEventBatch] = []
    core.scheduler.kv_cache.subscribe(batches.append)
    core.inbox.put(AddRequest(make_request(1, [1] * 5, 4)))
    core.core.drain_inbox(wait=False)
    sizes = []
    while core.scheduler.num_requests:
        core.core.step()
        sizes.append([len(batch.events) for batch in batches])
    # Step 1 fills the first block; step 4, the last, computes token 8, which fills the second.
    assert sizes == [[1], [1], [1], [1, 1]]
    core.inbox.put(ControlCall(1, 1, "reset_prefix_cache"))
    core.core.drain_inbox(wait=False)
    assert batches[-1].events == [AllBlocksCleared()]


def test_what_an_abort_makes_findable_is_published_before_the_core_sleeps(
    core: CoreUnderTest,
) -> None:
    kv_cache = core.scheduler.kv_cache
    batches: list[KVEventBatch] = []
    kv_cache.subscribe(batches.append)
    core.inbox.put(AddRequest(make_request(1, [1] * 5, 20)))
    core.core.drain_inbox(wait=False)
    for _ in range(4):  # the last one fills a second block
        core.core.step()
    core.inbox.put(AbortRequests([1]))
    core.core.drain_inbox(wait=False)
    assert core.scheduler.num_requests == 0
    stored = [event for batch in batches for event in batch.events]
    assert all(isinstance(event, BlockStored) for event in stored)
    assert sum(len(event.block_hashes) for event in stored) == kv_cache.num_cached_blocks == 2


def test_as_many_steps_are_in_flight_as_the_executor_takes(tmp_path: Path) -> None:
    trace_path = tmp_path / "trace.jsonl"
    trace = StepTrace(str(trace_path))
    core = CoreUnderTest(trace, num_groups=3, max_num_seqs=6)
    prompts = {handle: [handle] * 9 for handle in range(1, 7)}
    outputs = core.finish(*(AddRequest(make_request(h, p, 5)) for h, p in prompts.items()))
    trace.close()
    assert core.most_in_flight == 3
    assert len(ends(outputs)) == 6
    for handle, prompt in prompts.items():
        assert tokens_of(outputs, handle) == expected_tokens(prompt, 5)
    steps = [json.loads(line) for line in trace_path.read_text().splitlines()]
    assert [step["step"] for step in steps] == list(range(1, len(steps) + 1))
    assert {len(step["scheduled"]) for step in steps} == {2}, "groups are not equally large"
    assert all(step["duration_ms"] >= 0 for step in steps)


def test_a_pause_lets_the_steps_in_flight_end_and_begins_no_more() -> None:
    core = CoreUnderTest(num_groups=2)
    core.during_step = [ControlCall(1, 1, "pause")]
    for handle in (1, 2):
        core.inbox.put(AddRequest(make_request(handle, [handle] * 5, 5)))
    core.core.drain_inbox(wait=False)
    core.core.step()
    assert len(core.results) == 1
    core.core.step()
    assert len(core.results) == 0
    assert core.core.is_idle
    core.inbox.put(ControlCall(1, 2, "resume"))
    outputs = core.finish()
    assert len(ends(outputs)) == 2
