"""`nanocore trace` and `nanocore explain`, as a shell has them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from nanocore.tracing.explanation import REASONS
from tests.cli.served import exit_code
from tests.tracing.trace_lines import arrival, blocked, line, text, write


@pytest.fixture
def trace(tmp_path: Path) -> str:
    """a runs; b waits for its row for two steps, hits half of its prompt, and is preempted once."""
    came = [arrival("a", 8, 0.008, 0.009)]
    return write(
        tmp_path / "steps.jsonl",
        line(1, {"a": 8}, new=["a"], first=["a"], arrived=came),
        line(2, {"a": 1}, {"a": 8}, blocked=blocked("b", "rows"), num_waiting=1)
        | {"arrived": [arrival("b", 8, 0.018, 0.019, session=2)], "sent": {"a": 0.0205}},
        line(3, {"a": 1}, {"a": 9}, finished=["a"], blocked=blocked("b", "rows"), num_waiting=1),
        line(4, {"b": 4}, {"b": 4}, new=["b"], first=["b"], cached={"b": 4})
        | {"sent": {"b": 0.051}},
        line(5, {"c": 4}, new=["c"], preempted=["b"], preempted_by={"b": "c"})
        | {"blocked": blocked("b", "kv_blocks"), "arrived": [arrival("c", 4, 0.048, 0.049)]},
        line(6, {"b": 9}, resumed=["b"], finished=["b"]),
    )


def test_a_summary_in_words(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code("trace", trace) == 0
    written = capsys.readouterr()
    assert written.err == ""
    for words in (
        "run 1: 0.060 s, 6 steps (0.060 s in steps), 27 tokens computed (450/s)",
        "3, of which 2 finished; at most 1 running and 1 waiting at once",
        "at most 25.0% in use, 1 preemption",
        "4 of 20 prompt tokens cached, in 1 request",
        "20.000 ms  all rows were in use",
        "10.000 ms  not enough free KV blocks",
        "TTFT         p50 12.500 ms, p90 33.000 ms",
    ):
        assert words in written.out
    assert written.out.splitlines()[-2:] == ["     33.000 ms  b", "     12.500 ms  a"]


def test_what_a_client_put_into_an_id_does_not_reach_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    evil = "\x1b[31mevil\n"
    steps = line(1, {evil: 8}, new=[evil], first=[evil], arrived=[arrival(evil, 8, 0.008, 0.009)])
    trace = write(tmp_path / "steps.jsonl", steps | {"sent": {evil: 0.02}})
    for command in (("trace", trace), ("explain", evil, trace)):
        assert exit_code(*command) == 0
        out = capsys.readouterr().out
        assert repr(evil) in out
        assert "\x1b" not in out


def test_a_summary_for_programs(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    with Path(trace).open("a") as file:
        file.write(text([line(1, {"z": 1})]) + '{"step":2,')
    assert exit_code("trace", trace, "--json") == 0
    summary: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert (summary["file"], summary["num_cut_lines"]) == (trace, 1)
    first, second = summary["runs"]
    assert first["blocked_s"] == {"rows": pytest.approx(0.02), "kv_blocks": pytest.approx(0.01)}
    assert first["waiting"] == {
        "num": 3, "p50_ms": 1.0, "p90_ms": 21.0, "p99_ms": 21.0, "max_ms": 21.0,
    }  # fmt: skip
    assert [slow["request"] for slow in first["slowest"]] == ["b", "a"]
    assert (second["num_requests"], second["num_tokens"], second["ttft"]) == (1, 1, None)


def test_an_explanation_in_words(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code("explain", "b", trace) == 0
    assert capsys.readouterr().out == (
        "request b: run 1, finished, 8 prompt tokens, session 2\n"
        "  waited 21.000 ms:\n"
        f"     20.000 ms  {REASONS['rows']} (2 steps)\n"
        f"      1.000 ms  {REASONS['next_step']}\n"
        "  prefix cache: 4 of 8 tokens cached\n"
        "  preempted at 0.050000 s for c\n"
        "    paused for 10.000 ms:\n"
        f"       10.000 ms  {REASONS['kv_blocks']} (1 step)\n"
        "  time to first token 33.000 ms:\n"
        "      1.000 ms    3.0%  validation, and the step that was running\n"
        "     21.000 ms   63.6%  waiting for its first row\n"
        "     10.000 ms   30.3%  in steps that computed its prompt\n"
        "      1.000 ms    3.0%  from its first token to the socket\n"
        "  prompt computed in 2 steps, 0 decode steps\n"
    )


def test_drafts_are_told_of_a_run_and_of_a_request(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = write(
        tmp_path / "steps.jsonl",
        line(1, {"a": 8}, new=["a"], first=["a"], arrived=[arrival("a", 8, 0.008, 0.009)]),
        line(2, {"a": 5}, {"a": 8}, accepted={"a": 3}, sent={"a": 0.0205}),
        line(3, {"a": 1}, {"a": 12}),
        line(4, {"a": 4}, {"a": 13}, accepted={"a": 2}, finished=["a"]),
    )
    assert exit_code("trace", trace) == 0
    assert "\n  drafts       7 drafts computed, 5 accepted (71.4%)\n" in capsys.readouterr().out
    assert exit_code("explain", "a", trace) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == (
        "  prompt computed in 1 step, 3 decode steps, 7 drafts computed, 5 accepted (71.4%)"
    )
    assert exit_code("trace", trace, "--json") == 0
    (told,) = json.loads(capsys.readouterr().out)["runs"]
    assert (told["num_draft_tokens"], told["num_accepted_tokens"]) == (7, 5)


def test_an_explanation_for_programs(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code("explain", "--json", "b", trace) == 0
    told: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert (told["request"], told["state"]) == ("b", "finished")
    assert sum(part["ms"] for part in told["ttft_parts"]) == pytest.approx(told["ttft_ms"])
    assert [pause["by"] for pause in told["preemptions"]] == ["c"]


def test_the_file_is_steps_jsonl_unless_it_is_named(
    trace: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(Path(trace).parent)
    assert exit_code("explain", "c") == 0
    out = capsys.readouterr().out
    assert out.startswith("request c: run 1, running, 4 prompt tokens")
    assert "no first token in the trace" in out


def test_of_several_requests_of_one_id_the_last_is_explained(
    trace: str, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = Path(trace).read_text()
    Path(trace).write_text(whole + whole)
    assert exit_code("explain", "b", trace) == 0
    out = capsys.readouterr().out
    assert out.startswith("request b: run 2,")
    assert "2 requests had this id; this is the last one." in out


@pytest.mark.parametrize("of_server", ["chatcmpl-{}-0123abcd", "cmpl-{}-0123abcd-1", "msg_{}"])
def test_a_request_is_found_by_the_id_that_a_server_s_client_gave(
    of_server: str, trace: str, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = Path(trace).read_text()
    Path(trace).write_text(whole.replace('"b"', f'"{of_server.format("b.")}"'))
    assert exit_code("explain", "b.", trace) == 0
    assert capsys.readouterr().out.startswith(f"request {of_server.format('b.')}: run 1,")
    assert exit_code("explain", "bx", trace) == 2


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["trace"], "nanocore trace: no engine of this user writes a trace, and"),
        (["trace", "none.jsonl"], "nanocore trace: none.jsonl: No such file"),
        (["trace", "TRACE", "--draw"], "unrecognized arguments: --draw"),
        (["trace", "/dev/null"], "/dev/null holds no step"),
        (["explain"], "nanocore explain: the following arguments are required: REQUEST"),
        (["explain", "a", "none.jsonl"], "nanocore explain: none.jsonl: No such file"),
        (["explain", "bb", "TRACE"], "has no request 'bb'; similar ids: 'b'"),
        (["explain", "a", "/dev/null"], "has no request 'a'; it has no requests"),
    ],
)
def test_errors_are_one_line(
    trace: str, arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = Path(trace).read_text()
    assert exit_code(*(trace if one == "TRACE" else one for one in arguments)) == 2
    written = capsys.readouterr()
    assert said in written.err
    assert written.err.count("\n") == 1
    assert written.out == ""
    assert Path(trace).read_text() == before
