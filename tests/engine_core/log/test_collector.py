"""Metrics of a scheduler whose clock a test moves, against numbers worked out by hand."""

from __future__ import annotations

import pytest

from nanocore.engine_core.log.metrics import IoCounts
from nanocore.engine_core.requests.readiness import GRAMMAR
from nanocore.protocol.messages import Event
from tests.engine_core.log.clocked_engine import Engine
from tests.fakes import make_request, next_token

ABORT = Event(handle=1, finish_reason="abort")


def test_the_times_of_a_request_are_those_of_its_steps() -> None:
    engine = Engine()
    engine.add(make_request(1, [1] * 6, 3))
    engine.now_s += 5  # it waits
    for seconds in (1, 2, 4):
        engine.step(seconds)
    assert engine.scheduler.num_requests == 0
    assert engine.observed("time_to_first_token_seconds") == (1, 6)
    assert engine.observed("inter_token_latency_seconds") == (2, 6)
    assert engine.observed("request_time_per_output_token_seconds") == (1, 3)
    assert engine.observed("e2e_request_latency_seconds") == (1, 12)
    assert engine.observed("request_queue_time_seconds") == (1, 5)
    assert engine.observed("request_prefill_time_seconds") == (1, 1)
    assert engine.observed("request_decode_time_seconds") == (1, 6)
    assert engine.observed("request_inference_time_seconds") == (1, 7)
    assert engine.observed("request_prompt_tokens") == (1, 6)
    assert engine.observed("request_generation_tokens") == (1, 3)
    assert engine.observed("request_params_max_tokens") == (1, 3)
    assert engine.observed("iteration_tokens_total") == (3, 8)
    assert engine.value("request_success", ("finished_reason", "length")) == 1
    assert engine.value("request_success", ("finished_reason", "stop")) == 0
    assert engine.value("generation_tokens") == 3


def test_prompt_tokens_count_as_they_are_computed_and_when_a_request_begins_if_cached() -> None:
    engine = Engine(max_num_batched_tokens=8)
    for handle in (1, 2):
        engine.add(make_request(handle, [1] * 9, 1))
        assert engine.value("prompt_tokens") == 9 * (handle - 1)
        engine.step()
        if handle == 1:
            assert engine.value("prompt_tokens") == 8
            engine.step()
    assert engine.value("prompt_tokens") == 18
    assert engine.value("prompt_tokens_cached") == 8
    assert engine.value("prompt_tokens_by_source", ("source", "local_compute")) == 10
    assert engine.value("prompt_tokens_by_source", ("source", "local_cache_hit")) == 8
    assert engine.observed("request_prefill_kv_computed_tokens") == (2, 10)


def test_what_never_ran_has_an_end_and_no_other_time() -> None:
    engine = Engine()
    request = engine.add(make_request(1, [1] * 6, 3))
    engine.now_s += 2
    engine.scheduler.abort(request.handle)
    engine.scheduler.log.end(request, ABORT, engine.now_s)
    assert engine.value("request_success", ("finished_reason", "abort")) == 1
    assert engine.observed("e2e_request_latency_seconds") == (1, 2)
    for name in ("queue_time", "prefill_time", "decode_time", "inference_time"):
        assert engine.observed(f"request_{name}_seconds") == (0, 0)


def test_a_preempted_request_is_one_request() -> None:
    engine = Engine(num_blocks=6, enable_prefix_caching=False)
    for handle in (1, 2):
        engine.add(make_request(handle, [1] * 8, 8))
    while engine.scheduler.num_requests:
        engine.step()
    assert engine.value("num_preemptions") >= 1
    assert engine.observed("request_num_preemptions") == (2, engine.value("num_preemptions"))
    assert engine.observed("time_to_first_token_seconds")[0] == 2
    assert engine.observed("inter_token_latency_seconds")[0] == 2 * 7
    assert engine.observed("request_generation_tokens") == (2, 16)
    count, seconds = engine.observed("request_decode_time_seconds")
    assert (count, seconds) == (2, engine.observed("inter_token_latency_seconds")[1])


def test_drafts_count_by_request_by_token_and_by_position() -> None:
    engine = Engine(num_speculative_tokens=3)
    engine.executor.draft = lambda context: next_token(context) + (len(context) == 8)
    engine.add(make_request(1, [1] * 5, 7))
    while engine.scheduler.num_requests:
        engine.step()
    assert engine.value("spec_decode_num_drafts") == 2
    assert engine.value("spec_decode_num_draft_tokens") == 3 + 2
    assert engine.value("spec_decode_num_accepted_tokens") == 2 + 2
    name = "spec_decode_num_accepted_tokens_per_pos"
    by_position = [(s.labels, s.value) for s in engine.metrics()[name].samples]
    assert by_position == [([("position", str(i))], n) for i, n in enumerate([2, 2, 0])]
    assert name not in Engine().metrics()


def test_an_embedding_has_no_tokens_and_no_times_of_them() -> None:
    engine = Engine()
    engine.add(make_request(1, [1] * 6, 1, pooling="last"))
    engine.step()
    assert engine.scheduler.num_requests == 0
    assert engine.value("prompt_tokens") == 6
    assert engine.observed("e2e_request_latency_seconds") == (1, 1)
    assert engine.observed("time_to_first_token_seconds") == (0, 0)
    for name in ("prefill", "decode", "inference"):
        assert engine.observed(f"request_{name}_time_seconds") == (0, 0)


def test_samples_are_requests_and_together_one_with_n() -> None:
    engine = Engine()
    request = make_request(1, [1] * 5, 4, n=3)
    engine.add(request)
    engine.step()
    engine.step()
    (short, *_) = request.waiting_siblings or [request]
    engine.scheduler.abort(short.handle)
    engine.scheduler.log.end(short, ABORT, engine.now_s)
    assert engine.observed("request_params_n") == (0, 0)
    while engine.scheduler.num_requests:
        engine.step()
    assert engine.observed("request_params_n") == (1, 3)
    assert engine.observed("request_max_num_generation_tokens") == (1, 4)
    assert engine.observed("e2e_request_latency_seconds")[0] == 3


def test_what_the_message_handler_knows_is_in_it() -> None:
    engine = Engine()
    engine.add(make_request(1, [1] * 5, 4))
    unready = make_request(2, [1] * 5, 4, n=3)
    unready.wait_for(GRAMMAR)
    engine.add(unready)
    metrics = engine.metrics(IoCounts(num_clients=2, is_draining=True, closed={"gone": 7}))
    values = {
        (name, *(value for _, value in sample.labels)): sample.value
        for name, metric in metrics.items()
        for sample in metric.samples
    }
    assert values["num_clients",] == 2
    assert values["num_requests_waiting",] == 4
    assert values["num_requests_waiting_by_reason", "capacity"] == 1
    assert values["num_requests_waiting_by_reason", "deferred"] == 3
    assert values["engine_draining",] == 1
    assert values["sessions_closed", "gone"] == 7
    assert values["admission_rejections", "max_num_queued_reqs"] == 2
    assert values["cache_config_info", "b"] == 1


def test_the_log_is_emptied_whoever_asks() -> None:
    engine = Engine()
    for handle in range(1, 4):
        engine.add(make_request(handle, [1] * 5, 3))
    while engine.scheduler.num_requests:
        engine.step()
    assert len(engine.scheduler.log) > 3
    engine.collector.fold()
    assert not len(engine.scheduler.log)
    assert engine.observed("e2e_request_latency_seconds")[0] == 3


@pytest.mark.parametrize("num_others", [1, 255])
def test_a_step_of_the_same_rows_notes_as_much_however_many_they_are(num_others: int) -> None:
    engine = Engine(
        max_num_seqs=256, max_num_batched_tokens=2048, num_blocks=1024, max_model_len=64
    )
    for handle in range(1, num_others + 2):
        engine.add(make_request(handle, [1] * 4, 30))
    for _ in range(4):
        engine.step()
    engine.collector.fold()
    for _ in range(3):
        engine.step()
    assert len(engine.scheduler.log) == 2 * 3, "a step, and that the loop is done with it"
    steps = engine.scheduler.log.take().steps
    assert [step.intervals for step in steps] == [(1.0, num_others + 1)] * 3
    assert [step.num_tokens for step in steps] == [num_others + 1] * 3
