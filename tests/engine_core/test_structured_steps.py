"""Structured outputs in the step loop: when masks are filled, for whom, and what goes wrong."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from nanocore.engine_core.core import EngineCore
from nanocore.engine_core.grammars.mask_filler import MaskFiller
from nanocore.engine_core.log.trace import StepTrace
from nanocore.engine_core.mailbox import AbortRequests, AddRequest, ControlCall, Inbox, Outbox
from nanocore.engine_core.requests.readiness import GRAMMAR
from nanocore.engine_core.requests.request import Request
from nanocore.engine_core.scheduling.outputs import ClientOutput
from nanocore.engine_core.scheduling.scheduler import Scheduler
from nanocore.protocol.messages import Event
from nanocore.protocol.structured_outputs import StructuredOutputs
from nanocore.worker.plan import ModelRunnerOutput, SchedulerOutput, TokenMasks
from tests.engine_core.scheduler_checks import check_idle
from tests.fakes import (
    NUM_WORDS,
    VOCAB_SIZE,
    FakeGrammar,
    FakeMatcher,
    FakeProposer,
    PipelinedExecutor,
    expected_structured_tokens,
    expected_tokens,
    make_request,
    make_scheduler,
    tokens_by_handle,
)

GENEROUS_S = 60.0
DEPTHS = pytest.mark.parametrize(("depth", "num_groups"), [(1, 1), (2, 1), (3, 1), (2, 2), (3, 3)])


class Filler(MaskFiller):
    """Notes what the step loop is blamed for while it waits."""

    core: EngineCore
    blamed = ""

    def wait(self) -> tuple[list[int], dict[int, str]]:
        self.blamed = self.core.blame()
        return super().wait()


class Engine:
    """A core whose executor has `depth` steps in flight. log: what the core asked of it."""

    def __init__(
        self, depth: int = 1, num_groups: int = 1, trace: StepTrace | None = None, **limits: Any
    ) -> None:
        self.scheduler, executor = make_scheduler(num_groups=num_groups, **limits)
        self.worker = PipelinedExecutor(executor)
        self.max_concurrent_steps = depth
        self.inbox: Inbox = SimpleQueue()
        self.outbox = Outbox()
        num_masks = 8 * (1 + self.scheduler.config.num_speculative_tokens)
        self.filler = Filler(VOCAB_SIZE, num_masks, num_threads=2)
        core = EngineCore(self.scheduler, self, self.inbox, self.outbox, trace, masks=self.filler)
        self.core = self.filler.core = core
        self.log: list[str] = []
        self.masks: list[TokenMasks] = []
        self.steps: list[int] = []
        self.at_submit: Any = None
        self.at_collect: dict[int, list[Any]] = {}
        self.tokens: dict[int, list[int]] = {}
        self.ends: dict[int, Event] = {}

    def submit(self, plan: SchedulerOutput) -> None:
        self.log.append(f"submit {plan.step}")
        self.steps.append(plan.step)
        if self.at_submit is not None:
            self.at_submit()
        self.worker.submit(plan)

    def sample(self, masks: TokenMasks) -> None:
        self.log.append(f"sample {masks.step}")
        self.masks.append(masks)
        self.worker.sample(masks)

    def collect(self) -> ModelRunnerOutput:
        step = self.steps.pop(0)
        self.log.append(f"collect {step}")
        for event in self.at_collect.pop(step, []):
            self.inbox.put(event)
        return self.worker.collect()

    def blame(self) -> str:
        return "the executor"

    def on_failure(self, report: object) -> None: ...

    def run(self, *requests: Request) -> None:
        """Run them to their end."""
        for request in requests:
            self.inbox.put(AddRequest(request))
        self.core.drain_inbox(wait=False)
        while not self.core.is_idle:
            self.core.step()
        self.filler.close()
        for output in self.outbox.drain():
            if isinstance(output, ClientOutput):
                for handle, tokens in tokens_by_handle(output.tokens).items():
                    self.tokens.setdefault(handle, []).extend(tokens)
                for event in output.events:
                    if event.finish_reason is not None:
                        assert event.handle not in self.ends
                        self.ends[event.handle] = event


def structured(handle: int, prompt: list[int], max_tokens: int, **settings: Any) -> Request:
    request = make_request(handle, prompt, max_tokens, **settings)
    request.follow(FakeGrammar())
    return request


def matcher_of(request: Request) -> FakeMatcher:
    assert isinstance(request.matcher, FakeMatcher)
    return request.matcher


@DEPTHS
def test_structured_rows_run_beside_plain_ones(depth: int, num_groups: int) -> None:
    engine = Engine(depth, num_groups, max_num_batched_tokens=12)
    prompts = {handle: [handle] * (3 * handle) for handle in range(1, 7)}
    requests = {
        handle: (structured if handle % 2 else make_request)(handle, prompt, 3 + handle)
        for handle, prompt in prompts.items()
    }
    engine.run(*requests.values())
    for handle, prompt in prompts.items():
        expected = expected_structured_tokens if handle % 2 else expected_tokens
        assert engine.tokens[handle] == expected(prompt, 3 + handle)
        assert engine.ends[handle].finish_reason == "length"
        if handle % 2:
            matcher = matcher_of(requests[handle])
            assert matcher.output == engine.tokens[handle]
            assert matcher.num_fills == dict.fromkeys(range(3 + handle), 1), "once for each token"
    check_idle(engine.scheduler)


def test_only_steps_that_sample_a_structured_row_await_masks() -> None:
    engine = Engine(max_num_batched_tokens=8)
    engine.run(structured(1, [1] * 20, 2))
    assert engine.log == [
        *("submit 1", "collect 1", "submit 2", "collect 2"),
        *("submit 3", "sample 3", "collect 3", "submit 4", "sample 4", "collect 4"),
    ]


def test_a_step_whose_tokens_are_in_flight_samples_when_they_are_known() -> None:
    engine = Engine(depth=2)
    engine.run(structured(1, [1] * 5, 4))
    assert engine.log == [
        *("submit 1", "sample 1", "submit 2", "collect 1", "sample 2"),
        *("submit 3", "collect 2", "sample 3", "submit 4", "collect 3", "sample 4", "collect 4"),
    ]
    assert engine.tokens[1] == expected_structured_tokens([1] * 5, 4)


def test_a_row_that_is_new_need_not_wait_for_the_step_before() -> None:
    """Nothing that its mask follows from is in flight."""
    engine = Engine(depth=2, max_num_batched_tokens=12)
    engine.run(make_request(1, [1] * 8, 3), structured(2, [2] * 8, 1))
    assert engine.log[:4] == ["submit 1", "submit 2", "sample 2", "collect 1"]


@pytest.mark.parametrize(("depth", "num_groups"), [(1, 1), (2, 2)])
def test_masks_are_filled_while_the_model_runs(depth: int, num_groups: int) -> None:
    """`submit` returns only when a mask is being filled, which takes until then."""
    engine = Engine(depth, num_groups)
    begun, submitted = threading.Semaphore(0), threading.Semaphore(0)

    class Slow(FakeMatcher):
        def fill(self, words_W: NDArray[np.int32]) -> bool:
            begun.release()
            assert submitted.acquire(timeout=GENEROUS_S)
            return super().fill(words_W)

    def submit() -> None:
        assert begun.acquire(timeout=GENEROUS_S), "filling has not begun"
        submitted.release()

    engine.at_submit = submit
    request = make_request(1, [1] * 5, 4)
    request.matcher = Slow()
    engine.run(request)
    assert engine.tokens[1] == expected_structured_tokens([1] * 5, 4)


@DEPTHS
def test_a_matcher_that_fails_ends_its_own_request(depth: int, num_groups: int) -> None:
    engine = Engine(depth, num_groups)
    request = structured(1, [1] * 9, 8, n=2)
    other = structured(3, [3] * 5, 8)
    matcher_of(request).fails_at = 3
    engine.run(request, other, make_request(4, [4] * 6, 8))
    assert engine.ends[1].finish_reason == "error"
    assert engine.ends[1].message == "the fake grammar is too complex"
    assert engine.ends[1].code == "invalid_request"
    assert engine.tokens == {
        1: expected_structured_tokens([1] * 9, 3),
        2: expected_structured_tokens([1] * 9, 8),
        3: expected_structured_tokens([3] * 5, 8),
        4: expected_tokens([4] * 6, 8),
    }
    assert engine.scheduler.counters.num_aborts == 0
    check_idle(engine.scheduler)


@DEPTHS
def test_a_bug_in_a_mask_ends_its_own_request(
    depth: int, num_groups: int, caplog: pytest.LogCaptureFixture
) -> None:
    engine = Engine(depth, num_groups)
    request = structured(1, [1] * 9, 8)
    matcher_of(request).breaks_at = 2
    engine.run(request, structured(2, [2] * 5, 8))
    assert engine.ends[1].finish_reason == "error"
    assert engine.ends[1].message == "internal error: RuntimeError in its structured output"
    assert engine.ends[1].code is None
    assert engine.tokens[1] == expected_structured_tokens([1] * 9, 2)
    assert engine.tokens[2] == expected_structured_tokens([2] * 5, 8)
    assert "in fill" in caplog.text
    assert "a bug at [" not in caplog.text, "what is of a request stays out of the log"


def test_rows_that_end_before_their_masks_are_known_have_none() -> None:
    """The step samples all the same, and what it has for them is void."""
    engine = Engine(depth=2)
    engine.at_collect = {2: [AbortRequests([1])], 4: [AbortRequests([2])]}
    requests = [structured(handle, [handle] * 5, 9) for handle in (1, 2)]
    engine.run(*requests)
    rows = {masks.step: np.frombuffer(masks.rows, "<i4").tolist() for masks in engine.masks}
    assert 0 not in rows[3]
    assert rows[5] == []
    assert engine.log[-3:] == ["collect 4", "sample 5", "collect 5"]
    assert {handle: event.finish_reason for handle, event in engine.ends.items()} == {
        1: "abort",
        2: "abort",
    }
    assert [matcher_of(request).output for request in requests] == [
        engine.tokens[1],
        engine.tokens[2],
    ]
    check_idle(engine.scheduler)


def test_rows_that_may_sample_anything_have_no_mask() -> None:
    engine = Engine()
    request = make_request(1, [1] * 5, 2)

    class Free(FakeMatcher):
        def fill(self, words_W: NDArray[np.int32]) -> bool:
            words_W[:] = 0
            return False

    request.matcher = Free()
    engine.run(request)
    assert [(masks.rows, masks.words) for masks in engine.masks] == [(b"", b"")] * 2
    assert engine.tokens[1] == expected_tokens([1] * 5, 2)


def test_a_pause_lets_the_step_that_awaits_masks_finish() -> None:
    engine = Engine(depth=2)
    engine.at_collect = {1: [ControlCall(1, 1, "pause")]}
    engine.run(structured(1, [1] * 5, 9))
    assert engine.log == ["submit 1", "sample 1", "submit 2", "collect 1", "sample 2", "collect 2"]
    assert engine.tokens[1] == expected_structured_tokens([1] * 5, 2)


def test_drafts_of_a_structured_row_are_sampled_by_the_masks_behind_them() -> None:
    engine = Engine(num_speculative_tokens=3, proposer=FakeProposer)
    engine.run(structured(1, [1] * 5, 40), structured(2, [2] * 5, 30), make_request(3, [3] * 5, 30))
    assert engine.tokens[1] == expected_structured_tokens([1] * 5, 40)
    assert engine.tokens[2] == expected_structured_tokens([2] * 5, 30)
    assert engine.tokens[3] == expected_tokens([3] * 5, 30)
    assert engine.scheduler.counters.num_steps < 40
    rows = [np.frombuffer(masks.rows, "<i4").tolist() for masks in engine.masks]
    assert any(len(set(one)) < len(one) for one in rows)


@pytest.mark.parametrize("fails_at", range(1, 9))
def test_a_grammar_that_fails_behind_a_draft_fails_where_it_would_without(fails_at: int) -> None:
    engine = Engine(num_speculative_tokens=3, proposer=FakeProposer)
    request = make_request(1, [1] * 5, 20)
    request.matcher = FakeMatcher(fails_at=fails_at)
    engine.run(request)
    assert engine.tokens[1] == expected_structured_tokens([1] * 5, fails_at)
    assert engine.ends[1].finish_reason == "error"
    assert "too complex" in (engine.ends[1].message or "")


def test_a_structured_row_computes_no_drafts_that_a_worker_proposes() -> None:
    """Masks behind drafts need their tokens; others draft beside it."""
    engine = Engine(num_speculative_tokens=3)
    engine.run(structured(1, [1] * 5, 9), make_request(2, [2] * 5, 30))
    assert engine.tokens[1] == expected_structured_tokens([1] * 5, 9)
    assert engine.tokens[2] == expected_tokens([2] * 5, 30)
    assert engine.scheduler.counters.num_steps < 30


def test_workers_are_not_told_what_a_grammar_says() -> None:
    scheduler, _ = make_scheduler()
    request = structured(1, [1] * 5, 2, structured_outputs=StructuredOutputs(json='{"a": 1}'))
    scheduler.add(request)
    plan = scheduler.schedule()
    assert plan.awaits_masks
    assert plan.added[0].sampling.structured_outputs is None
    assert request.sampling.structured_outputs is not None


def waiting_to_be_compiled(scheduler: Scheduler, request: Request) -> Request:
    request.wait_for(GRAMMAR)
    scheduler.add(request)
    return request


def compiled(scheduler: Scheduler, request: Request) -> None:
    request.follow(FakeGrammar())
    for sample in request.samples:
        scheduler.ready(sample.handle, GRAMMAR)


def test_a_request_that_waited_to_be_compiled_has_the_place_of_its_submit() -> None:
    """Before those that came after it, which it does not hold up."""
    scheduler, executor = make_scheduler(max_num_seqs=1)
    scheduler.add(make_request(1, [1] * 5, 3))
    scheduler.update(executor.execute(scheduler.schedule()))
    late = waiting_to_be_compiled(scheduler, make_request(2, [2] * 5, 3, n=2))
    scheduler.update(executor.execute(scheduler.schedule()))
    scheduler.add(make_request(4, [4] * 5, 3))
    assert [request.handle for request in scheduler.waiting] == [4]
    assert (scheduler.num_requests, scheduler.num_waiting, scheduler.num_unready) == (2, 1, 2)
    compiled(scheduler, late)
    assert [request.handle for request in scheduler.waiting] == [2, 4]
    assert [sample.arrival for sample in late.samples] == [1, 1]
    assert (scheduler.num_requests, scheduler.num_waiting, scheduler.num_unready) == (4, 3, 0)


def test_the_time_to_compile_counts_as_waiting_where_that_is_worth_priority() -> None:
    time_s = [0.0]
    scheduler, executor = make_scheduler(
        policy="priority", priority_aging_s=60.0, max_num_seqs=1, clock=lambda: time_s[0]
    )
    scheduler.add(make_request(1, [1] * 5, 9))
    scheduler.update(executor.execute(scheduler.schedule()))
    time_s[0] = 1.0
    late = waiting_to_be_compiled(scheduler, make_request(3, [3] * 5, 3))
    time_s[0] = 2.0  # came after another one with as many steps done: they are equals
    early = waiting_to_be_compiled(scheduler, make_request(2, [2] * 5, 3))
    scheduler.update(executor.execute(scheduler.schedule()))
    time_s[0] = 10.0
    scheduler.add(make_request(4, [4] * 5, 3))
    time_s[0] = 11.0
    compiled(scheduler, late)
    assert [request.handle for request in scheduler.waiting] == [3, 4]
    compiled(scheduler, early)
    assert [request.handle for request in scheduler.waiting] == [2, 3, 4]
    logged = {
        one.request.handle: one for one in scheduler.log.take().requests if one.kind == "queued"
    }
    assert [logged[one.handle].at_s for one in (early, late)] == [11.0, 11.0]


def test_a_step_that_waits_for_masks_is_blamed_on_their_requests() -> None:
    engine = Engine()
    assert engine.core.blame() == "the executor"
    engine.run(*[structured(handle, [handle] * 5, 2) for handle in range(1, 6)])
    assert engine.filler.blamed == (
        "it waits for the masks of the structured outputs of requests 'r1', 'r2', 'r3' and 2 more"
    )
    assert engine.core.blame() == "the executor"


def test_the_trace_has_structured_requests_like_others(tmp_path: Path) -> None:
    trace = StepTrace(str(tmp_path / "trace"))
    engine = Engine(2, 1, trace)
    failing = structured(1, [1] * 5, 6)
    matcher_of(failing).fails_at = 2
    engine.run(failing, structured(2, [2] * 5, 6))
    trace.close()
    lines = [json.loads(line) for line in (tmp_path / "trace").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
    finished = [request_id for line in lines for request_id in line["finished"]]
    assert finished == ["r1", "r2"]


class Meeting(FakeMatcher):
    """Is filled only when the other one is, too."""

    barrier = threading.Barrier(2)

    def fill(self, words_W: NDArray[np.int32]) -> bool:
        self.barrier.wait(GENEROUS_S)
        words_W[:] = 7
        return True


def test_rows_are_shared_out_among_threads() -> None:
    filler = MaskFiller(VOCAB_SIZE, 4, num_threads=2)
    for _ in range(3):
        filler.begin([Meeting(), Meeting()])
        assert filler.wait() == ([0, 1], {})
        assert filler.words([1]) == np.full(NUM_WORDS, 7, "<i4").tobytes()
    filler.close()


def test_no_rows_need_no_thread_and_closing_twice_is_closing() -> None:
    filler = MaskFiller(VOCAB_SIZE, 4)
    filler.begin([])
    assert filler.wait() == ([], {})
    assert filler.words([]) == b""
    filler.close()
    filler.close()


def test_a_panic_of_native_code_is_this_rows_alone() -> None:
    class Panic(BaseException): ...

    class Panicking(FakeMatcher):
        def fill(self, words_W: NDArray[np.int32]) -> bool:
            raise Panic

    filler = MaskFiller(VOCAB_SIZE, 4, num_threads=1)
    for _ in range(2):  # the thread goes on
        filler.begin([Panicking(), FakeMatcher()])
        has_mask, failures = filler.wait()
        assert 0 not in has_mask
        assert failures == {0: "internal error: Panic in its structured output"}
    filler.close()
