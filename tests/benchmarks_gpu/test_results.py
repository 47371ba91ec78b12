"""What was measured on a GPU survives crashes, hangs, lost devices and torn files."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from benchmarks.gpu import gpu_tests, part
from benchmarks.gpu.engine import engine_settings
from benchmarks.gpu.goals import GOALS, NOT_MEASURED, goals_table, main
from benchmarks.gpu.results import (
    LOST_CODE,
    Records,
    Results,
    Session,
    UnavailableError,
    summary,
)

NAME = "rehearsal.jsonl"
ROOT = Path(__file__).parents[2]


def make_session(*folders: Path, **changes: Any) -> Session:
    settings = {"folders": folders, "device": torch.device("cpu"), "small": True}
    return Session(**(settings | changes))


def unavailable() -> dict[str, Any]:
    raise UnavailableError("not carried")


def not_installed() -> dict[str, Any]:
    raise ModuleNotFoundError("No module named 'flash_attn'")


def test_what_was_measured_is_kept_and_not_measured_again(tmp_path: Path) -> None:
    folders = tmp_path / "work", tmp_path / "out"
    first = Results(make_session(*folders))
    first.run(
        {"p/a": lambda: {"us": 1}, "p/b": lambda: {"us": 1 / 0}, "p/c": unavailable,
         "p/d": not_installed}, needs_s=0,
    )  # fmt: skip
    for folder in folders:
        found = Records(NAME, (folder,))
        assert found.figures == {"p/a": {"us": 1, "commit": found.head["commit"]}}
        assert "ZeroDivisionError" in found.errors["p/b"]
        assert found.skipped == {"p/c": "not carried", "p/d": "No module named 'flash_attn'"}
        assert found.missing == []
    second = Results(make_session(*folders))
    second.run(dict.fromkeys(("p/a", "p/b", "p/c", "p/e"), lambda: {"us": 2}), needs_s=0)
    figures = second.records.figures
    assert {name: found["us"] for name, found in figures.items()} == {"p/a": 1, "p/c": 2, "p/e": 2}
    assert second.records.errors.keys() == {"p/b"}


def test_a_report_says_who_measured_what_where(tmp_path: Path) -> None:
    results = Results(make_session(tmp_path))
    results.run({"p/a": lambda: {"us": 1}}, needs_s=0)
    report = results.records.report()
    assert report["versions"]["torch"] == version("torch")
    assert report["device"] == {"name": "cpu"}
    assert report["small"]
    assert {"date", "command", "commit", "host"} <= report.keys()


def test_the_time_limit_is_no_error_of_a_measurement(tmp_path: Path) -> None:
    late = Results(make_session(tmp_path, deadline_s=0.0))
    late.run({"p/a": lambda: {"us": 1 / 0}, "p/b": lambda: {"us": 1}}, needs_s=0)
    assert late.records.errors == {}
    assert late.records.missing == ["p/a"]
    late.run({"p/b": lambda: {}, "p/c": lambda: {}}, needs_s=1)
    assert late.records.missing == ["p/c"]


def test_a_line_that_was_cut_short_is_as_if_it_had_not_been_written(tmp_path: Path) -> None:
    records = Records(NAME, (tmp_path,))
    records.add(planned={"p": ["p/a", "p/b"]})
    records.add(name="p/a", figures={"us": 1})
    path = tmp_path / NAME
    path.write_bytes(path.read_bytes() + b'\n[1, 2]\n\xff\xfe\n{"name": "p/b", "figures": {"u')
    Records(NAME, (tmp_path,)).add(name="p/c", figures={"us": 3})
    found = Records(NAME, (tmp_path,))
    assert found.figures.keys() == {"p/a", "p/c"}
    assert found.missing == ["p/b"]


BROKEN = """
import os, sys, time, torch
from pathlib import Path
from benchmarks.gpu.results import Results, Session

def graph(): raise RuntimeError("WorkerError: no graph of 8 decodes could be captured")
def wrong(): raise AssertionError("wrong by 0.3")
def lost():
    torch.cuda.synchronize = lambda: 1 / 0  # as after an illegal access
    raise RuntimeError("an illegal memory access")

on_gpu = Session.on_gpu
Session.on_gpu = property(lambda _: True)
torch.cuda.synchronize = torch.cuda.empty_cache = lambda: None
results = Results(Session(folders=(Path(sys.argv[1]),), device=torch.device("cpu"), small=True))
found = {"p/wrong": wrong, "p/lost": lost, "p/hangs": lambda: time.sleep(1000),
         "p/crashes": os.abort, "p/graph": graph, "p/last": lambda: {"us": 1}}
results.run(found, hangs_s=3.0)
"""


@pytest.mark.campaign
def test_a_broken_device_is_told_apart_from_a_wrong_result(tmp_path: Path) -> None:
    """A wrong result costs itself; a lost device, a hang and a crash cost the process, too."""
    codes = []
    for _ in range(5):
        command = [sys.executable, "-c", BROKEN, str(tmp_path)]
        codes.append(subprocess.run(command, cwd=ROOT, check=False, timeout=110).returncode)
        records = Records(NAME, (tmp_path,))
        if begun := records.begun:  # as day.py does
            records.add(name=begun, error=f"crash or hang: exit code {codes[-1]}")
    assert codes == [LOST_CODE, 1, -signal.SIGABRT, LOST_CODE, 0]
    assert "lost" not in records.errors["p/wrong"]
    assert "wrong by 0.3" in records.errors["p/wrong"]
    for name in ("p/lost", "p/graph"):
        assert "the device is lost to this process" in records.errors[name]
    assert "exit code 1" in records.errors["p/hangs"]
    assert "exit code -6" in records.errors["p/crashes"]
    assert records.figures.keys() == {"p/last"}


@pytest.mark.parametrize("name", ["speed/tiny/start", "large/tiny/start"])
def test_where_graphs_cannot_be_recorded_engines_start_without(name: str, tmp_path: Path) -> None:
    results = Results(make_session(tmp_path))
    assert "enforce_eager" not in engine_settings(results)
    results.records.add(name="large/tiny/decode/b1", error="WorkerError: no graph of 8 decodes")
    assert "enforce_eager" not in engine_settings(results)
    results.records.add(name=name, error="WorkerError: no graph of 8 decodes")
    assert engine_settings(results)["enforce_eager"]


def test_a_rehearsal_is_not_in_the_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Results(make_session(tmp_path)).records.add()
    path = tmp_path / "gpu.json"
    path.write_text(json.dumps(Records(NAME, (tmp_path,)).report()))
    assert main([str(path)]) == 2
    assert main([]) == 2
    assert "of a GPU" in capsys.readouterr().err
    nothing: dict[str, Any] = {
        "figures": {}, "errors": {GOALS[0].measurement: "wrong"}, "device": {"name": "NVIDIA H100"}
    }  # fmt: skip
    assert goals_table(nothing).count(NOT_MEASURED) == len(GOALS) - 1
    assert goals_table(nothing).count("failed") == 1


TESTS = """
import warnings
import pytest

def test_passes(): warnings.warn("as a newer library might")
@pytest.mark.skip(reason="no such device")
def test_is_skipped(): pass
"""


@pytest.mark.campaign
def test_gpu_tests_are_counted_and_failures_are_told(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "test_a.py"
    path.write_text(TESTS)
    results = Results(make_session(tmp_path, deadline_s=time.monotonic() + 1000))
    assert gpu_tests.run_tests(results, "tests", path) == {"passed": 1, "skipped": 1}
    path.write_text(TESTS + "def test_fails(): assert 1 == 2, 'the kernel is wrong'\n")
    with pytest.raises(AssertionError, match="'failed': 1"):
        gpu_tests.run_tests(results, "tests", path)
    [(name, error)] = results.records.errors.items()
    assert name.endswith("::test_fails")
    assert "the kernel is wrong" in error
    [passed] = [n for n, f in results.records.figures.items() if f["outcome"] == "passed"]
    assert passed.endswith("::test_passes")
    path.write_text("import no_such_module")
    with pytest.raises(AssertionError, match="exit code 2"):
        gpu_tests.run_tests(results, "tests", path)
    assert "No module named 'no_such_module'" in capfd.readouterr().out, "the log"


STOPS = """
def test_passes(): pass
def test_takes_long():
    import threading
    threading.Event().wait()
"""


@pytest.mark.campaign
def test_a_limit_costs_only_the_tests_that_have_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "test_a.py"
    path.write_text(STOPS)
    results = Results(make_session(tmp_path))
    stop = Mock()
    monkeypatch.setattr("benchmarks.gpu.gpu_tests.threading.Timer", stop)
    record = gpu_tests._record

    def record_and_reach_the_limit(*arguments: Any) -> None:
        record(*arguments)
        monkeypatch.setattr(Session, "remaining_s", 0.0)
        (_, kill), _ = stop.call_args
        kill()

    monkeypatch.setattr(gpu_tests, "_record", record_and_reach_the_limit)
    with pytest.raises(subprocess.TimeoutExpired):
        gpu_tests.run_tests(results, "tests", path)
    [name] = results.records.figures
    assert name.endswith("::test_passes")


def test_a_measurement_is_told_in_a_line() -> None:
    spread = {"median": 1.23456, "min": 1.0, "max": 2.0}
    figures = {"step_ms": spread, "kernels": "triton", "phases_s": {"load": 2}, "eager": False}
    assert summary("p/a", {"figures": figures}) == "p/a: step_ms=1.2346 phases_s.load=2"
    assert len(summary("p/a", {"figures": dict.fromkeys(map(str, range(99)), 1)})) == 110
    error = {"error": "Traceback\n  ...\nValueError: no\n\n"}
    assert summary("p/a", error) == "p/a: ERROR ValueError: no"
    assert summary("p/a", {"skipped": "not carried"}) == "p/a: skipped: not carried"


def test_a_machine_without_a_gpu_is_told_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    assert part.main(["env", "--out", str(tmp_path)]) == 2
    assert "torch sees no CUDA device" in capsys.readouterr().out
