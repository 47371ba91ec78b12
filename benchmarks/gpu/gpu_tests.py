"""The tests that need a GPU, each a measurement: its seconds, or why it failed.

pytest runs in this process, so that a test that breaks the device or hangs is treated as any other
measurement is. Of pytest's configuration nothing is heeded that could fail a test for what it does
not test: warnings, plugins that are not there.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any, Final

from benchmarks.gpu.run import ROOT
from benchmarks.gpu.session import BrokenContextError, Results, Session, exit_broken

_FLAGS: Final = (
    "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-o", "addopts=", "-o", "filterwarnings=",
    "--continue-on-collection-errors", "--import-mode=importlib", "--tb=short",
)  # fmt: skip
_ALL: Final = "all tests"


def measure(session: Session) -> None:
    """All of tests/gpu."""
    run_tests(session, ROOT / "tests" / "gpu")


def run_tests(session: Session, folder: Path) -> None:
    """Those in the folder that this report does not have yet."""
    results = Results(session, "tests", needs_s=3.0, hangs_s=90.0)
    try:
        import pytest
    except ModuleNotFoundError as error:
        results.fail(_ALL, error)
        return
    results.forget(_ALL)
    os.environ["TRITON_INTERPRET"] = "0" if session.on_gpu else "1"
    code = pytest.main([str(folder), "--rootdir", str(ROOT), *_FLAGS], plugins=[_Recorder(results)])
    is_known = code == pytest.ExitCode.NO_TESTS_COLLECTED and results.data["measurements"]
    if code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED) and not is_known:
        if not results.data["errors"]:
            results.fail(_ALL, f"pytest ended with {code!r}: see its output")


def place(path: Path) -> tuple[bool, bool, str]:
    """Real streams and graphs first; the kernels one by one last, for time to cut off."""
    return path.name == "test_kernels.py", path.name != "test_cuda_steps.py", path.name


class _Recorder:
    """A plugin of pytest."""

    def __init__(self, results: Results) -> None:
        self._results = results
        self._start_s = 0.0
        self._has_begun = False

    def pytest_collectreport(self, report: Any) -> None:
        """A file that cannot be imported is an error of its own."""
        if report.failed:
            self._results.fail(report.nodeid, str(report.longrepr))
        else:
            self._results.forget(report.nodeid)

    def pytest_collection_modifyitems(self, config: Any, items: list[Any]) -> None:
        """Leave out what is not wanted, or known; the most telling files first."""
        items.sort(key=lambda item: place(item.path))
        self._results.expect([item.nodeid for item in items])
        items[:] = [item for item in items if item.nodeid in self._results.data["missing"]]

    def pytest_runtest_protocol(self, item: Any) -> bool | None:
        """True: there is no time for another one."""
        if self._results.session.remaining_s < self._results.needs_s:
            return True
        self._start_s, self._has_begun = time.monotonic(), True
        self._results.begin(item.nodeid)
        return None

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Of set-up, call and teardown: the first that does not pass, or the end of all."""
        if not self._has_begun:
            return
        if report.passed and report.when != "teardown":
            return
        self._has_begun = False
        if report.skipped:
            self._results.skip(report.nodeid, str(report.longrepr[-1]))
        elif report.passed:
            seconds = round(time.monotonic() - self._start_s, 3)
            self._results.put(report.nodeid, {"seconds": seconds})
        else:
            try:
                self._results.fail(report.nodeid, str(report.longrepr))
            except BrokenContextError as error:
                exit_broken(error)
