"""What a start leaves for later waits for moments in which the engine has nothing to do."""

from __future__ import annotations

from collections.abc import Iterator
from queue import SimpleQueue

import pytest

from nanocore.engine_core.process import start_parts as module
from nanocore.engine_core.process.start_parts import NUM_IDLE_POLLS, IdleWork


@pytest.fixture(autouse=True)
def _quick_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "POLL_S", 0.0)


def test_each_work_waits_until_polls_in_a_row_have_found_nothing_to_do() -> None:
    polls: Iterator[bool] = iter([True] * (NUM_IDLE_POLLS - 1) + [False] + [True] * 100)
    done: SimpleQueue[tuple[str, int]] = SimpleQueue()
    num_polls = 0

    def is_idle() -> bool:
        nonlocal num_polls
        num_polls += 1
        return next(polls)

    works = [lambda: done.put(("a", num_polls)), lambda: done.put(("b", num_polls))]
    with IdleWork(is_idle, works):
        assert done.get(timeout=60) == ("a", 2 * NUM_IDLE_POLLS)
        assert done.get(timeout=60) == ("b", 3 * NUM_IDLE_POLLS)


def test_a_work_that_fails_is_told_and_the_next_one_is_done(
    caplog: pytest.LogCaptureFixture,
) -> None:
    done: SimpleQueue[None] = SimpleQueue()
    with IdleWork(lambda: True, [lambda: 1 / 0, lambda: done.put(None)]):  # type: ignore[list-item]
        done.get(timeout=60)
    assert "ZeroDivisionError" in caplog.text


def test_nothing_begins_once_it_is_closed() -> None:
    asked: SimpleQueue[None] = SimpleQueue()
    begun: list[int] = []

    def is_idle() -> bool:
        asked.put(None)
        work.__exit__()
        return True

    work = IdleWork(is_idle, [lambda: begun.append(1)])
    with work:
        asked.get(timeout=60)
    assert begun == []
