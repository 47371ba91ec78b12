"""No token ends a request before its min_tokens; workers are told what not to sample till then."""

from __future__ import annotations

from typing import Any

import pytest

from tests.fakes import Deliveries, expected_tokens, make_request, make_scheduler

PROMPT = [3, 1, 4, 1, 5]
TOKENS = expected_tokens(PROMPT, 20)
STOP = TOKENS[2]


def run(max_tokens: int = 9, num_drafts: int = 0, **more: Any) -> tuple[Deliveries, list[int]]:
    """What is delivered, and the ids that the worker is told."""
    scheduler, executor = make_scheduler(num_speculative_tokens=num_drafts)
    # As a worker that is not told of them would: the same tokens, whatever ends a request.
    scheduler.add(make_request(1, PROMPT, max_tokens, **more))
    deliveries = Deliveries()
    (new,) = deliveries.step(scheduler, executor).added
    while scheduler.num_requests:
        deliveries.step(scheduler, executor)
    return deliveries, new.stop_token_ids


@pytest.mark.parametrize("num_drafts", [0, 3])
@pytest.mark.parametrize("kind", ["eos", "stop_token_ids"])
@pytest.mark.parametrize(("min_tokens", "num_tokens"), [(0, 3), (1, 3), (2, 3), (3, 9)])
def test_a_token_before_min_tokens_ends_nothing(
    kind: str, min_tokens: int, num_tokens: int, num_drafts: int
) -> None:
    assert STOP not in TOKENS[:2] + TOKENS[3:9]
    more: dict[str, Any] = {kind: (STOP,)}
    deliveries, _ = run(num_drafts=num_drafts, min_tokens=min_tokens, **more)
    assert deliveries.tokens[1] == TOKENS[:num_tokens]
    assert deliveries.finish_reasons[1] == ("stop" if num_tokens == 3 else "length")


def test_the_length_ends_it_all_the_same() -> None:
    deliveries, _ = run(3, min_tokens=3, eos=(STOP,))
    assert deliveries.tokens[1] == TOKENS[:3]
    assert deliveries.finish_reasons[1] == "length"


def test_workers_are_told_what_ends_a_request_only_where_it_is_put_off() -> None:
    ends: dict[str, Any] = {"eos": (40, 7), "stop_token_ids": (41, 7, 3)}
    assert run(min_tokens=1, **ends)[1] == [3, 7, 40, 41]
    assert run(**ends)[1] == []
    assert run(min_tokens=1, stop_token_ids=(41, 3))[1] == [3, 41]  # EOS is ignored
    assert run(min_tokens=1)[1] == []
