"""Results of nanocore batch: their file, and the runner that fills it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from nanocore.cli.batch.calls import CallResponse, ask
from nanocore.cli.batch.pending import BadLine, BatchRequest, PendingLines, ResultIndex
from nanocore.cli.batch.results import Results, bad_line, response_line
from nanocore.cli.batch.session import BatchRunner, default_concurrency, summary
from nanocore.http.exchange import Receive, Scope, Send
from nanocore.protocol.errors import ConfigError, EngineDeadError, NanocoreError
from nanocore.protocol.messages import Limits

OK = CallResponse(200, "r", b'{"text": "x",\n "n": 1}', None)
REFUSED = CallResponse(400, "r", b'{"error": {"message": "no", "code": "c", "type": "t"}}', None)


def asked(line: int, custom_id: str) -> BatchRequest:
    return BatchRequest(line, custom_id, "/v1/completions", b"{}")


def bad(line: int, custom_id: str | None = None) -> BadLine:
    return BadLine(line, custom_id, "invalid_url", "the url is not served")


@pytest.fixture
def ledger() -> ResultIndex:
    return ResultIndex()


def left(
    path: Path, lines: Sequence[BatchRequest | BadLine], ledger: ResultIndex
) -> tuple[list[BatchRequest | BadLine], PendingLines]:
    """What a run that finds this file has to do, of these lines of the input."""
    Results(str(path), ledger).close()
    plan = PendingLines(iter(lines), ledger)
    assert plan.has_more() in (True, False)
    return list(iter(plan.next, None)), plan


def read(data: bytes) -> Any:
    assert data.count(b"\n") == 1
    assert data.endswith(b"\n")
    return json.loads(data)


def test_results_refusals_and_errors_are_lines_as_openai_has_them() -> None:
    data, error = response_line(asked(3, "é"), OK)
    line = read(data)
    assert line.pop("id").startswith("batch_req_")
    assert line == {
        "custom_id": "é",
        "response": {"status_code": 200, "request_id": "r", "body": {"text": "x", "n": 1}},
        "error": None,
    }
    assert error is None

    data, error = response_line(asked(3, "a"), REFUSED)
    line = read(data)
    assert line["response"]["status_code"] == 400
    assert line["response"]["body"] == json.loads(REFUSED.body)
    assert line["error"] == {"code": "c", "message": "no", "line": 3}
    assert error is not None

    line = read(bad_line(bad(3))[0])
    assert (line["custom_id"], line["response"]) == (None, None)
    message = "line 3: the url is not served"
    assert line["error"] == {"code": "invalid_url", "message": message, "line": 3}


def test_what_has_a_result_is_not_left_to_do(tmp_path: Path, ledger: ResultIndex) -> None:
    path = tmp_path / "out"
    lines = [asked(1, "a"), asked(2, "b"), bad(3), bad(4, "d"), bad(5), asked(6, "f")]
    path.write_bytes(
        response_line(asked(6, "f"), OK)[0]
        + bad_line(bad(3))[0]
        + response_line(asked(1, "a"), REFUSED)[0]
        + bad_line(bad(4, "d"))[0]
    )
    before = path.read_bytes()
    to_do, plan = left(path, lines, ledger)
    assert [line.line for line in to_do] == [2, 5]
    assert (plan.num_done, plan.num_failed) == (4, 3)
    assert path.read_bytes() == before


def test_the_second_line_of_a_custom_id_is_an_error_once(
    tmp_path: Path, ledger: ResultIndex
) -> None:
    path = tmp_path / "out"
    lines = [asked(1, "a"), asked(2, "a"), asked(3, "b"), bad(4, "a")]
    to_do, _ = left(path, lines, ledger)
    assert [line.line for line in to_do] == [1, 2, 3, 4]
    assert isinstance(to_do[1], BadLine)
    assert isinstance(to_do[3], BadLine)
    assert to_do[1].code == to_do[3].code == "duplicate_custom_id"
    assert "line 1 has the same custom_id" in to_do[1].message
    # That is no result of the line that has it first.
    path.write_bytes(bad_line(to_do[1])[0])
    to_do, plan = left(path, lines, ResultIndex())
    assert [line.line for line in to_do] == [1, 3, 4]
    assert plan.num_failed == 1


def test_wherever_a_last_line_is_cut_it_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "out"
    whole = response_line(asked(1, "a"), OK)[0]
    last = response_line(asked(2, "b"), OK)[0]
    for num_bytes in range(len(last)):
        path.write_bytes(whole + last[:num_bytes])
        ledger = ResultIndex()
        with closing(Results(str(path), ledger)) as results:
            assert path.read_bytes() == whole
            assert [ledger.failed.get(name) for name in "ab"] == [False, None]
            results.append(last)
        assert path.read_bytes() == whole + last


@pytest.mark.parametrize(
    "data",
    [
        b"{}\n",
        b'{"custom_id": "a", "method": "POST", "url": "/", "body": {}}\n',
        b'{"custom_id": "a", "method": "POST"',
        b"text",
        b"\xff\n",
        b'{"id":"batch_req_","custom_id":null,"error":null}\n',
        b'{"id":"batch_req_","custom_id":1,"error":null}\n',
        b'{"id": "batch_req_1","custom_id":"a","error":null}\n',
    ],
)
def test_a_file_of_anything_else_is_refused_and_left_as_it_is(
    data: bytes, tmp_path: Path, ledger: ResultIndex
) -> None:
    path = tmp_path / "out"
    path.write_bytes(data)
    with pytest.raises(ConfigError, match="line 1 is not a batch result"):
        Results(str(path), ledger)
    assert path.read_bytes() == data


def test_two_results_of_one_custom_id_are_refused(tmp_path: Path, ledger: ResultIndex) -> None:
    path = tmp_path / "out"
    path.write_bytes(response_line(asked(1, "a"), OK)[0] * 2)
    with pytest.raises(ConfigError, match="line 2 is a second result of 'a'"):
        Results(str(path), ledger)


def test_one_run_at_a_time_writes_a_file(tmp_path: Path, ledger: ResultIndex) -> None:
    path = str(tmp_path / "out")
    with closing(Results(path, ledger)), pytest.raises(ConfigError, match="another run is writing"):
        Results(path, ledger)
    Results(path, ledger).close()


def test_what_cannot_be_written_is_said(tmp_path: Path, ledger: ResultIndex) -> None:
    with pytest.raises(ConfigError, match="No such file or directory"):
        Results(str(tmp_path / "no" / "out"), ledger)
    with closing(Results("/dev/full", ledger)) as full:
        unwritten = pytest.raises(NanocoreError, match="cannot write a result: No space")
        with unwritten:
            full.append(b"{}\n")


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
    """One run of all lines. paused_s: what it has waited. summary: what it says at its end."""

    def __init__(self, path: Path, app: PlayedApp, lines: Iterator[Any]) -> None:
        self.summary: list[str] = []
        self.paused_s: list[float] = []
        self.num_shown = 0
        self.path = path
        self._app = app
        self._lines = lines

    def __call__(self, max_concurrency: int = 2) -> BatchRunner:
        ledger = ResultIndex()
        with closing(Results(str(self.path), ledger)) as results:
            plan = PendingLines(self._lines, ledger)
            runner = BatchRunner(plan, results, self._show, self._pause)
            asyncio.run(runner.run(partial(ask, self._app), max_concurrency))
            self.summary = summary(plan, runner)
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


def test_at_the_end_the_counts_are_said_and_how_to_try_again(
    new_run: Callable[..., Run],
) -> None:
    bad = [BadLine(9 + i, None, "invalid_json_line", f"no {i}") for i in range(3)]
    first = new_run(PlayedApp(500), [LINES[0], *bad, LINES[1]])
    first(1)
    assert first.summary == ["5 lines: 1 succeeded, 4 failed"]
    again = new_run(PlayedApp(500), LINES)
    again()
    assert again.summary == [
        "6 lines: 5 succeeded, 1 failed (2 lines in earlier runs)",
        "errors of earlier runs are kept: remove their lines to try them again",
    ]


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
