"""Repetition detection: requests that end because their output repeats itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanocore.engine_core.requests.ends import RepetitionDetector, end_by_outputs
from nanocore.protocol.messages import Event
from nanocore.protocol.sampling import RepetitionDetectionParams
from tests.engine_core.scheduler_checks import Engine
from tests.fakes import make_request

PROMPT = [7, 7, 7, 7, 7]
LOOP = [1, 2, 3, 1, 2, 4, 5, 6, 4, 5, 6, 4, 5, 6, 4, 5, 6]
TWO_TO_THREE = RepetitionDetectionParams(max_pattern_size=3, min_pattern_size=2, min_count=3)
NUM_TOKENS = 14
"""Of LOOP, up to the end of the third 4, 5, 6."""


def repeats(output: Sequence[int], params: RepetitionDetectionParams) -> bool:
    """Whether the output ends with a repetition: the definition, word for word."""
    return any(
        len(output) >= size * params.min_count
        and list(output[-size * params.min_count :]) == list(output[-size:]) * params.min_count
        for size in range(max(params.min_pattern_size, 1), params.max_pattern_size + 1)
    )


@st.composite
def parameters(draw: st.DrawFn) -> RepetitionDetectionParams:
    last = draw(st.integers(1, 9))
    return RepetitionDetectionParams(
        max_pattern_size=last,
        min_pattern_size=draw(st.integers(0, last)),
        min_count=draw(st.integers(2, 4)),
    )


@st.composite
def outputs(draw: st.DrawFn) -> list[int]:
    """Tokens with loops in them."""
    output: list[int] = []
    for _ in range(draw(st.integers(0, 4))):
        pattern = draw(st.lists(st.integers(0, 3), min_size=1, max_size=10))
        output += pattern * draw(st.integers(1, 9))
    return output


@given(parameters(), outputs(), st.data())
def test_a_detector_knows_each_output_that_repeats_itself(
    params: RepetitionDetectionParams, output: list[int], data: st.DataObject
) -> None:
    num_before = data.draw(st.integers(0, len(output)))
    detector = RepetitionDetector(params, np.array(output[:num_before], np.int32))
    assert detector.is_repeating == repeats(output[:num_before], params)
    for end in range(num_before + 1, len(output) + 1):
        assert detector.append(output[end - 1]) == repeats(output[:end], params)


def test_patterns_may_have_the_largest_size_and_count() -> None:
    pattern = np.random.default_rng(0).permutation(1024).astype(np.int32)
    params = RepetitionDetectionParams(max_pattern_size=1024, min_count=3)
    output = np.tile(pattern, 3)
    detector = RepetitionDetector(params, output[:-1])
    assert not detector.is_repeating
    assert detector.append(int(output[-1]))
    most = RepetitionDetectionParams(max_pattern_size=1024, min_count=2**20)
    assert not RepetitionDetector(most, output).is_repeating


def engine_of(tokens: Sequence[int], num_drafts: int, **limits: Any) -> Engine:
    """An engine whose model says these tokens after each prompt of the length of PROMPT."""
    engine = Engine(num_speculative_tokens=num_drafts, **limits)
    engine.executor.sample = lambda context: tokens[len(context) - len(PROMPT)]
    if num_drafts:
        engine.executor.draft = engine.executor.sample
    return engine


def ends_of(engine: Engine) -> list[Event]:
    """Run to the end; the last events of the requests."""
    ends: list[Event] = []
    while engine.scheduler.num_requests:
        engine.step()
        ends += [event for _, event in engine.scheduler.completed.ends]
    return ends


@pytest.mark.parametrize("num_drafts", [0, 1, 3, 4])
@pytest.mark.parametrize(
    ("more", "num_tokens", "end"),
    [
        ({}, NUM_TOKENS, {"finish_reason": "stop", "stop_cause": "repetition"}),
        ({"min_tokens": 14}, 14, {"finish_reason": "stop", "stop_cause": "repetition"}),
        ({"min_tokens": 16}, 16, {"finish_reason": "stop", "stop_cause": "repetition"}),
        ({"stop_token_ids": (6,), "min_tokens": 13}, 14,
         {"finish_reason": "stop", "stop_reason": 6}),
        ({"eos": (6,), "min_tokens": 13}, 14, {"finish_reason": "stop"}),
        ({"stop_token_ids": (3,)}, 3, {"finish_reason": "stop", "stop_reason": 3}),
    ],
)  # fmt: skip
def test_the_token_that_completes_a_repetition_ends_the_request(
    num_drafts: int, more: dict[str, Any], num_tokens: int, end: dict[str, Any]
) -> None:
    engine = engine_of(LOOP, num_drafts)
    request = make_request(1, PROMPT, len(LOOP), repetition_detection=TWO_TO_THREE, **more)
    engine.scheduler.add(request)
    assert ends_of(engine) == [Event(handle=1, **end)]
    assert engine.tokens[1] == LOOP[:num_tokens]


def test_a_repetition_comes_before_the_length_and_others_run_on() -> None:
    engine = engine_of(LOOP, 0)
    params = {"repetition_detection": TWO_TO_THREE}
    engine.scheduler.add(make_request(1, PROMPT, NUM_TOKENS, **params))
    engine.scheduler.add(make_request(2, PROMPT, NUM_TOKENS - 1, **params))
    engine.scheduler.add(make_request(3, PROMPT, len(LOOP)))
    ends = {event.handle: (event.finish_reason, event.stop_cause) for event in ends_of(engine)}
    assert ends == {1: ("stop", "repetition"), 2: ("length", None), 3: ("length", None)}
    assert {handle: len(tokens) for handle, tokens in engine.tokens.items()} == {
        1: 14,
        2: 13,
        3: 17,
    }


@pytest.mark.parametrize("num_drafts", [0, 2])
def test_preempted_requests_end_with_the_same_token(num_drafts: int) -> None:
    engine = engine_of(LOOP, num_drafts, num_blocks=8, block_size=4, enable_prefix_caching=False)
    for handle in (1, 2, 3):
        engine.scheduler.add(
            make_request(handle, PROMPT, len(LOOP), repetition_detection=TWO_TO_THREE)
        )
    assert [event.stop_cause for event in ends_of(engine)] == ["repetition"] * 3
    assert engine.scheduler.counters.num_preemptions
    assert engine.tokens == dict.fromkeys((1, 2, 3), LOOP[:NUM_TOKENS])
    assert not engine.scheduler.running.detectors


@pytest.mark.parametrize("num_done", range(1, NUM_TOKENS))
def test_resumed_requests_end_with_the_same_token(num_done: int) -> None:
    engine = engine_of(LOOP, 0)
    request = make_request(
        1, PROMPT, len(LOOP), outputs=LOOP[:num_done], repetition_detection=TWO_TO_THREE
    )
    assert end_by_outputs(request) is None
    engine.scheduler.add(request)
    assert [event.stop_cause for event in ends_of(engine)] == ["repetition"]
    assert engine.tokens[1] == LOOP[num_done:NUM_TOKENS]


@pytest.mark.parametrize(
    ("more", "end"),
    [
        ({}, {"finish_reason": "stop", "stop_cause": "repetition"}),
        ({"stop_token_ids": (6,)}, {"finish_reason": "stop", "stop_reason": 6}),
        ({"min_tokens": 15}, None),
    ],
)
def test_outputs_that_end_with_a_repetition_have_ended(
    more: dict[str, Any], end: dict[str, Any] | None
) -> None:
    request = make_request(
        1, PROMPT, 14 if end else 15, outputs=LOOP[:14], repetition_detection=TWO_TO_THREE, **more
    )
    assert end_by_outputs(request) == (Event(handle=1, **end) if end else None)
