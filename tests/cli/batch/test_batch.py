"""`nanocore batch` with a real engine: it is killed, interrupted, and goes on where it stopped."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nanocore.cli.batch import results
from nanocore.cli.main import main
from tests.cli.paused_engine import paused
from tests.cli.served import DEMO, EXIT_TIMEOUT_S
from tests.end_to_end import forked

NUM_LINES = 24
KILLED_AT = 9


@pytest.fixture(scope="module")
def engine() -> Iterator[forked.Engine]:
    with forked.engine(DEMO, "--dtype", "float32", "--max-num-seqs", "8") as running:
        yield running


def bodies() -> Iterator[tuple[str, dict[str, Any]]]:
    """Of all kinds, greedy and seeded."""
    for n in range(NUM_LINES):
        message = {"role": "user", "content": f"What is {n} + {n * n}?"}
        yield [
            ("/v1/chat/completions", {"messages": [message], "temperature": 0}),
            ("/v1/completions", {"prompt": f"{n} {n + 1}", "seed": n, "temperature": 1, "n": 2}),
            ("/v1/embeddings", {"input": [str(n), "and"]}),
            ("/v1/responses", {"input": f"Count from {n} to 9.", "temperature": 0}),
        ][n % 4]  # type: ignore[misc]


@pytest.fixture
def requests(tmp_path: Path) -> Path:
    path = tmp_path / "in.jsonl"
    lines = [
        json.dumps({"custom_id": f"r{n}", "method": "POST", "url": url, "body": body})
        for n, (url, body) in enumerate(bodies())
    ]
    path.write_text("\n".join(lines))
    return path


def batch(*arguments: str | Path) -> int:
    """Its exit code."""
    with pytest.raises(SystemExit) as ended:
        main(["batch", *map(str, arguments)])
    assert isinstance(ended.value.code, int)
    return ended.value.code


def answers(path: Path) -> dict[str, Any]:
    """What is answered to each custom_id, without names and times that each run makes anew."""
    found: dict[str, Any] = {}
    for line in path.read_text().splitlines():
        result = json.loads(line)
        assert result["custom_id"] not in found, "a custom_id has one result"
        assert (result["error"], result["response"]["status_code"]) == (None, 200)
        found[result["custom_id"]] = _plain(result["response"]["body"])
    return found


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        changing = ("id", "created", "created_at", "completed_at", "usage", "seed")
        return {key: _plain(of) for key, of in value.items() if key not in changing}
    return [_plain(of) for of in value] if isinstance(value, list) else value


def batch_that_dies(arguments: list[str]) -> None:
    """Killed, as by the system, in the middle of writing a result."""
    write = results.Results.append
    num_written = 0

    def append(self: results.Results, line: bytes) -> None:
        nonlocal num_written
        num_written += 1
        if num_written < KILLED_AT:
            write(self, line)
        else:
            write(self, line[: len(line) // 2])
            os.kill(os.getpid(), signal.SIGKILL)

    results.Results.append = append  # type: ignore[method-assign]
    batch(*arguments)


def test_what_was_killed_goes_on_and_answers_as_if_nothing_had_been(
    engine: forked.Engine, requests: Path, tmp_path: Path
) -> None:
    undisturbed, out = tmp_path / "undisturbed", tmp_path / "out"
    assert batch(requests, undisturbed, "--endpoint", engine.endpoint) == 0
    flags = (str(requests), str(out), "--endpoint", engine.endpoint, "--max-concurrency", "5")
    killed = forked.start(tmp_path / "log", flags, batch_that_dies)
    killed.join(EXIT_TIMEOUT_S)
    assert killed.exitcode == -signal.SIGKILL
    before = out.read_bytes()
    assert before.count(b"\n") == KILLED_AT - 1
    assert not before.endswith(b"\n")
    assert batch(*flags) == 0
    assert out.read_bytes().startswith(before[: before.rindex(b"\n") + 1])
    assert answers(out) == answers(undisturbed)
    assert answers(out).keys() == {f"r{n}" for n in range(NUM_LINES)}


def test_an_interrupted_run_ends_in_order_and_leaves_nothing_running(
    engine: forked.Engine, requests: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    flags = (str(requests), str(out), "--endpoint", engine.endpoint, "--max-concurrency", "3")
    with paused(engine.endpoint) as held:
        command = [sys.executable, "-m", "nanocore", "batch", *flags]
        running = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        try:
            held.wait_for(5)  # a chat, two samples, and two inputs
            running.send_signal(signal.SIGINT)
            _, log = running.communicate(timeout=EXIT_TIMEOUT_S)
        finally:
            running.kill()
        assert running.returncode == 130
        assert "interrupted; run the same command again" in log
        assert "Traceback" not in log
        held.wait_for(0)
        assert out.read_bytes() == b""
        held.resume()
    assert batch(*flags) == 0
    assert len(answers(out)) == NUM_LINES


def test_every_line_has_its_result_and_an_error_is_told_by_the_exit_code(
    engine: forked.Engine, requests: Path, tmp_path: Path
) -> None:
    """A second run finds nothing to do, and needs no engine to say so again."""
    out = tmp_path / "out"
    lines = requests.read_text().splitlines()[:2]
    body = {"messages": [], "model": "demo"}
    more = {"custom_id": "r0", "method": "POST", "url": "/v1/chat/completions", "body": body}
    lines += ["{", json.dumps(more), json.dumps(more | {"custom_id": "b"})]
    requests.write_text("\n".join(lines))
    flags = ("--served-model-name", "demo", "--endpoint")
    assert batch(requests, out, *flags, engine.endpoint) == 1
    found = [json.loads(line) for line in out.read_text().splitlines()]
    outcomes = {
        (line["custom_id"], line["error"] and line["error"]["line"]): line["response"]
        and line["response"]["status_code"]
        for line in found
    }
    assert outcomes == {
        ("r0", None): 200, ("r1", None): 200, (None, 3): None, ("r0", 4): None, ("b", 5): 400
    }  # fmt: skip
    assert {line["response"]["body"]["model"] for line in found if line["error"] is None} == {
        "demo"
    }
    before = out.read_bytes()
    assert batch("-i", requests, "-o", out, *flags, f"ipc://{tmp_path}/nobody") == 1
    assert out.read_bytes() == before


def test_files_that_cannot_be_are_said_before_an_engine_is_asked(
    requests: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    nobody = ("--endpoint", f"ipc://{tmp_path}/nobody")
    for source, target, text in (
        (tmp_path / "no", tmp_path / "out", "No such file"),
        (tmp_path, tmp_path / "out", "Is a directory"),
        (requests, requests, "line 1 is not a batch result"),
        (requests, tmp_path, "Is a directory"),
    ):
        before = requests.read_bytes()
        assert batch(source, target, *nobody) == 2
        said = capfd.readouterr().err
        assert text in said
        assert said.count("\n") == 1
        assert requests.read_bytes() == before


@pytest.mark.campaign
def test_an_engine_of_its_own_is_launched_with_the_flags_that_are_its(
    requests: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert batch(requests, tmp_path / "out", "--max-num-seqs", "2", "--dtype", "float32") == 0
    assert len(answers(tmp_path / "out")) == NUM_LINES
    assert "the demo model" in capfd.readouterr().err


@pytest.mark.campaign
def test_why_its_engine_does_not_start_is_said_with_its_exit_code(
    requests: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert batch(requests, tmp_path / "out", "--model", "/no/such/model") == 3
    assert (
        "nanocore batch: model /no/such/model: there is no such file or folder"
        in capfd.readouterr().err
    )
    assert batch(requests, tmp_path / "out", "--max-concurency", "2") == 2
    assert "`nanocore batch` has --max-concurrency, and" in capfd.readouterr().err
