"""A run, with an application that a test plays: how many at once, and what an overload costs."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from nanocore.cli.batch.lines import BadLine, BatchRequest
from nanocore.cli.batch.pending import PendingLines, ResultIndex
from nanocore.cli.batch.results import Results
from nanocore.cli.batch.runner import BatchRunner, default_concurrency
from nanocore.http.exchange import Receive, Scope, Send
from nanocore.protocol.errors import EngineDeadError
from nanocore.protocol.messages import Limits

LINES = [BatchRequest(n, f"r{n}", "/v1/completions", b'{"n": %d}' % n) for n in range(1, 7)]


class PlayedApp:
    """Answers by its script: the statuses of each request in a row, then 200.

    most: requests that were open at once.
    """

    def __init__(self, *statuses: int) -> None:
        self.statuses = {line.body: [*statuses] for line in LINES[:1]}
        self.most = 0
        self.num_asked = 0
        self._num_open = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = (await receive())["body"]
        self.num_asked += 1
        self._num_open += 1
        self.most = max(self.most, self._num_open)
        await asyncio.sleep(0)
        self._num_open -= 1
        script = self.statuses.get(body, [])
        status = script.pop(0) if script else 200
        headers = [(b"x-request-id", b"r"), (b"retry-after", b"7")]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": b'{"asked": %b}' % body})


class Run:
    """One run of all lines. paused_s: what it has waited."""

    def __init__(self, path: Path, app: PlayedApp, lines: Iterator[Any]) -> None:
        self.paused_s: list[float] = []
        self.num_shown = 0
        self.path = path
        self._app = app
        self._lines = lines

    def __call__(self, max_concurrency: int = 2) -> BatchRunner:
        with closing(ResultIndex()) as ledger, closing(Results(str(self.path), ledger)) as results:
            plan = PendingLines(self._lines, ledger)
            runner = BatchRunner(self._app, plan, results, self._show, self._pause)
            asyncio.run(runner.run(max_concurrency))
            return runner

    def results(self) -> list[Any]:
        return [json.loads(line) for line in self.path.read_text().splitlines()]

    def _show(self) -> None:
        self.num_shown += 1

    async def _pause(self, seconds: float) -> None:
        self.paused_s.append(seconds)


@pytest.fixture
def new_run(tmp_path: Path) -> Callable[..., Run]:
    return lambda app, lines=LINES: Run(tmp_path / "out", app, iter(lines))


@pytest.mark.parametrize("max_concurrency", [1, 4, 100])
def test_so_many_are_asked_at_once_and_each_is_answered(
    new_run: Callable[..., Run], max_concurrency: int
) -> None:
    app = PlayedApp()
    run = new_run(app)
    runner = run(max_concurrency)
    assert app.most <= max_concurrency
    assert (runner.num_answered, runner.num_failed, run.num_shown) == (6, 0, 6)
    found = {line["custom_id"]: line["response"]["body"]["asked"]["n"] for line in run.results()}
    assert found == {f"r{n}": n for n in range(1, 7)}


def test_a_line_that_is_none_is_a_result_and_the_others_go_on(new_run: Callable[..., Run]) -> None:
    run = new_run(PlayedApp(), [BadLine(9, None, "invalid_json_line", "no"), *LINES])
    runner = run(1)
    assert (runner.num_answered, runner.num_failed) == (6, 1)


def test_a_full_engine_is_asked_again_when_it_says_for_as_long_as_it_takes(
    new_run: Callable[..., Run],
) -> None:
    app = PlayedApp(*[429] * 100)
    run = new_run(app)
    assert run().num_answered == 6
    assert run.paused_s == [7.0] * 100
    assert app.num_asked == 106


def test_an_engine_that_comes_back_in_time_answers(new_run: Callable[..., Run]) -> None:
    run = new_run(PlayedApp(503, 429, 503))
    assert run().num_answered == 6
    assert run.paused_s == [7.0] * 3


def test_an_engine_that_is_gone_ends_the_run_and_what_is_answered_stays(
    new_run: Callable[..., Run],
) -> None:
    run = new_run(PlayedApp(*[503] * 100), [*LINES[1:], LINES[0]])
    with pytest.raises(EngineDeadError, match="run the same command again"):
        run(1)
    assert len(run.results()) == 5
    assert sum(run.paused_s) <= 30


def test_an_error_of_the_server_is_a_result(new_run: Callable[..., Run]) -> None:
    run = new_run(PlayedApp(500))
    runner = run()
    assert (runner.num_answered, runner.num_failed) == (5, 1)


@pytest.mark.parametrize(("most_queued", "expected"), [(None, 16), (3, 11), (4096, 16)])
def test_by_default_as_many_wait_as_run_if_the_engine_lets_them(
    most_queued: int | None, expected: int
) -> None:
    limits = Limits(
        max_frame_bytes=1,
        max_num_seqs=8,
        ping_interval_ms=1,
        session_timeout_ms=1,
        max_num_queued_reqs=most_queued,
    )
    assert default_concurrency(limits) == expected
