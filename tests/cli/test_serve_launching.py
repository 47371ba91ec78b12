"""`nanocore serve` with an engine of its own: both end together, and causes are told."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from tests.cli.served import Descendants, answered, children, run_to_exit, serving


def engine_pid(server_pid: int) -> int:
    """The engine that serves is the one that was started first of those that live."""
    for pid in children(server_pid):
        if b"nanocore.engine_core" in Path(f"/proc/{pid}/cmdline").read_bytes():
            return pid
    raise AssertionError("there is no engine")


def directory_of(log: list[str]) -> Path:
    """Of the launched engine's socket."""
    (line,) = [line for line in log if "ready: " in line and "ipc:" in line]
    return Path(line.rpartition("ipc://")[2].strip()).parent


def test_a_server_answers_while_its_engine_loads_and_ends_it() -> None:
    with serving("--max-num-seqs", "8", "--served-model-name", "demo") as server:
        assert server.get("/livez")[0] == 200
        assert server.get("/readyz")[0] == 503
        ready = server.line("ready: ")
        assert f"http://127.0.0.1:{server.port}" in ready
        assert server.get("/readyz")[0] == 200
        status, answer = answered(server.ask(model="demo"))
        assert (status, answer["model"]) == (200, "demo")
        below = Descendants(server.pid)
        server.signal(signal.SIGTERM)
        assert server.exit() == 0
        below.wait_until_all_end()
        assert not directory_of(server.log).exists()


def test_a_log_for_programs_has_objects_alone_of_the_engine_too_and_no_prompt() -> None:
    with serving("--log-format", "json", "--enable-access-log") as server:
        server.line("| engine ipc:")
        secret = [{"role": "user", "content": "marzipan"}]
        assert answered(server.ask(messages=secret, cache_salt="salted"))[0] == 200
        server.signal(signal.SIGTERM)
        assert server.exit() == 0
        lines = [json.loads(line) for line in server.log]
    assert {line["process"] for line in lines} == {"serve", "engine"}
    assert {"time", "level", "process", "pid", "message"} == set().union(*lines)
    assert any("POST /v1/chat/completions" in line["message"] for line in lines)
    assert "marzipan" not in "".join(server.log)
    assert "salted" not in "".join(server.log)


def test_nothing_outlives_a_server_that_is_killed() -> None:
    with serving("--http-workers", "2") as server:
        server.line("ready: ")
        below = Descendants(server.pid)
        assert len(below.pids) >= 3
        server.signal(signal.SIGKILL)
        below.wait_until_all_end()


@pytest.mark.parametrize("num_workers", [1, pytest.param(2, marks=pytest.mark.campaign)])
def test_the_engines_last_death_ends_the_server_with_its_cause(num_workers: int) -> None:
    with serving("--http-workers", str(num_workers), "--max-restarts", "0") as server:
        server.line("ready: ")
        below = Descendants(server.pid)
        os.kill(engine_pid(server.pid), signal.SIGKILL)
        assert server.exit() == 70
        below.wait_until_all_end()
        assert server.log[-1] == (
            "nanocore serve: the engine process exited with code -9, so the server ends; "
            "see the engine's log\n"
        )
        assert "Traceback" not in "".join(server.log)


@pytest.mark.campaign
def test_a_signal_while_the_engine_loads_ends_both() -> None:
    with serving() as server:
        server.line("(engine pid=")
        below = Descendants(server.pid)
        server.signal(signal.SIGINT)
        assert server.exit() == 130
        below.wait_until_all_end()


@pytest.mark.parametrize(
    ("arguments", "exit_code", "text"),
    [
        pytest.param(["/no/such/model"], 3, "/no/such/model", marks=pytest.mark.campaign),
        (["--max-num-sequences", "8"], 2, "did you mean --max-num-seqs?"),
        pytest.param(["--ctx-size", "8"], 2, "mean --max-model-len?", marks=pytest.mark.campaign),
        (["--prot", "8"], 2, "`nanocore serve` has --port"),
    ],
)
def test_an_engine_that_does_not_start_says_why(
    arguments: list[str], exit_code: int, text: str
) -> None:
    done = run_to_exit(*arguments)
    assert done.returncode == exit_code
    last = done.stderr.splitlines()[-1]
    assert last.startswith("nanocore serve: ")
    assert text in last
    assert "Traceback" not in done.stderr
