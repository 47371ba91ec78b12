"""The tests that need a GPU, each test a measurement: whether it passed, or what failed.

One pytest runs them with as many processes as there are cores, up to eight: most of their time is
compilation, which is the host's. A test is recorded as it ends, so that a limit costs only what has
not run. This module is a plugin of that pytest, too: it writes a line of JSON for each test. Of
pytest's configuration nothing is heeded that could fail a test for what it does not test: warnings,
plugins that are not there.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path
from typing import Any, Final

from benchmarks.gpu.fa3 import FOLDER_VARIABLE
from benchmarks.gpu.results import Measurements, Results, UnavailableError

ROOT: Final = Path(__file__).resolve().parents[2]
FOLDER: Final = Path("tests/gpu")
_MAX_PROCESSES: Final = 8
_REPORT_FD: Final = "NANOCORE_GPU_TEST_REPORTS"
"""Names the file descriptor that the plugin writes to."""
_WORKER: Final = "PYTEST_XDIST_WORKER"
_FLAGS: Final = (
    "-q", "-p", __name__, "-p", "no:cacheprovider", "-o", "addopts=", "-o", "filterwarnings=",
    "--import-mode=importlib", "--tb=short", "--maxfail=20", "--color=no",
)  # fmt: skip


def measure(results: Results, part: str) -> None:
    """All files at once."""
    measurements: Measurements = {f"{part}/all": partial(run_tests, results, part, FOLDER)}
    results.run(measurements, needs_s=15, hangs_s=240)


def run_tests(results: Results, part: str, path: Path) -> dict[str, Any]:
    """Record each test under this path that has not passed yet; returns numbers by outcome.

    Raises:
        AssertionError: some failed, or none could be run. TimeoutExpired: they took too long.
    """
    if importlib.util.find_spec("pytest") is None:
        raise UnavailableError("pytest is not installed")
    session, flags = results.session, list(_FLAGS)
    if session.on_gpu and importlib.util.find_spec("xdist") is not None:
        flags += ["-n", str(min(_MAX_PROCESSES, os.cpu_count() or 1)), "--dist", "worksteal"]
    else:
        flags += ["-p", "no:xdist"]
    for name, figures in results.records.figures.items():
        if figures.get("outcome") == "passed":
            flags += ["--deselect", name.removeprefix(f"{part}/")]
    reader, writer = os.pipe()
    changes = {"TRITON_INTERPRET": "0" if session.on_gpu else "1", _REPORT_FD: str(writer)}
    if session.carried is not None:
        changes[FOLDER_VARIABLE] = str(session.carried)
    # Where this runs in a test of pytest-xdist, the run below is no worker of that one.
    inherited = {name: value for name, value in os.environ.items() if name != _WORKER}
    process = subprocess.Popen(
        [sys.executable, "-m", "pytest", str(path), *flags], cwd=ROOT, pass_fds=(writer,),
        env=inherited | changes,
    )  # fmt: skip
    os.close(writer)
    limit_s = min(session.remaining_s, threading.TIMEOUT_MAX)
    limit = threading.Timer(limit_s, process.kill)
    limit.start()
    counts: dict[str, int] = {}
    try:
        with os.fdopen(reader) as lines:
            for line in lines:
                _record(results, part, json.loads(line), counts)
        process.wait()
    finally:
        process.kill()  # of no effect where it has ended
        limit.cancel()
    if session.remaining_s == 0:
        raise subprocess.TimeoutExpired("pytest", limit_s)
    if process.returncode != 0 or not counts:
        raise AssertionError(f"pytest's exit code {process.returncode}, {counts}: see the log")
    return counts


def _record(results: Results, part: str, report: dict[str, str], counts: dict[str, int]) -> None:
    name, outcome = f"{part}/{report['name']}", report["outcome"]
    counts[outcome] = counts.get(outcome, 0) + 1
    if outcome == "failed":
        results.add(name, error=report["text"])
    else:
        results.records.add(name=name, figures={"outcome": outcome})


def pytest_runtest_logreport(report: Any) -> None:
    """Tell of a test that ended, or could not begin: pytest's hook, in the process that leads."""
    if _WORKER in os.environ or _REPORT_FD not in os.environ:
        return
    if report.when == "call" or report.outcome != "passed":
        text = report.longreprtext[-10_000:] if report.failed else ""
        line = json.dumps({"name": report.nodeid, "outcome": report.outcome, "text": text})
        os.write(int(os.environ[_REPORT_FD]), f"{line}\n".encode())
