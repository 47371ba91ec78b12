"""A server that launches its engine, without network or packages from its folder."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import pytest

from tests.cli.served import DEMO, Descendants, answered, run_to_exit, serving, serving_forked


def directory_of(log: list[str]) -> Path:
    """Of the launched engine's socket."""
    (line,) = [line for line in log if "ready: " in line and "ipc:" in line]
    return Path(line.rpartition("ipc://")[2].strip()).parent


def test_a_server_answers_while_its_engine_loads_and_ends_it() -> None:
    with serving("--max-num-seqs", "8", "--served-model-name", "demo") as server:
        assert "launching an engine" in server.log[0]  # before what serves HTTP is imported
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
    with serving_forked("--log-format", "json", "--enable-access-log") as server:
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
    with serving_forked("--http-workers", str(num_workers), "--max-restarts", "0") as server:
        server.line("ready: ")
        (engine,) = server.engine_pids()
        below = Descendants(server.pid, engine)
        os.kill(engine, signal.SIGKILL)
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
        server.wait_until_logged("(engine pid=")
        below = Descendants(server.pid)
        server.signal(signal.SIGINT)
        assert server.exit() == 130
        below.wait_until_all_end()


@pytest.mark.parametrize(
    ("arguments", "exit_code", "text"),
    [
        pytest.param(["/no/such/model"], 3, "/no/such/model", marks=pytest.mark.campaign),
        (["--max-num-sequences", "8"], 2, "did you mean --max-num-seqs?"),
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


SAFE = '#!/bin/sh\nexec "{python}" -P "$@"\n'
NAMES = ("random", "torch", "uvicorn", "msgspec", "jinja2", "llguidance", "nanocore_demo_model")


@pytest.mark.campaign
def test_no_process_of_a_server_imports_from_the_folder_it_is_started_in(tmp_path: Path) -> None:
    """The server itself is started as its command is, which has no script's folder in its path."""
    folder = tmp_path / "hostile"
    (folder / "nanocore").mkdir(parents=True)
    for name in (*NAMES, "nanocore/__init__"):
        (folder / f"{name}.py").write_text('raise SystemExit("hijacked")')
    safe = tmp_path / "python"
    safe.write_text(SAFE.format(python=sys.executable))
    safe.chmod(0o755)
    flags = ("--http-workers", "2", "--tensor-parallel-size", "2", "--max-num-seqs", "8")
    with serving(*flags, python=str(safe), cwd=folder) as server:
        server.line("ready:")
        schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": [579]}}}
        asked = server.ask(8, response_format=schema, temperature=0, ignore_eos=False)
        status, answer = answered(asked)
        assert status == 200, answer
        assert answer["choices"][0]["message"]["content"] == "579"
        card = server.get("/v1/models")[1]["data"][0]
        assert Path(card["root"]) == DEMO
        assert "hijacked" not in "".join(server.log)
