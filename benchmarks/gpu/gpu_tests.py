"""The tests that need a GPU, each file a measurement: how many passed, or what failed.

Each file has a pytest of its own, so that a test that breaks the device costs the rest of its file.
Of pytest's configuration nothing is heeded that could fail a test for what it does not test:
warnings, plugins that are not there.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any, Final

from benchmarks.gpu.results import Measurements, Results, Session, UnavailableError

ROOT: Final = Path(__file__).resolve().parents[2]
_FILES: Final = ("test_cuda_steps.py", "test_fp8.py", "test_kernels.py")
"""Real streams and graphs first; the kernels one by one last, for time to cut off."""
_FLAGS: Final = (
    "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-o", "addopts=", "-o", "filterwarnings=",
    "--import-mode=importlib", "--tb=short", "--maxfail=20",
)  # fmt: skip


def measure(results: Results, _part: str) -> None:
    """All files."""
    results.run(measurements(results.session), needs_s=15, hangs_s=240)


def measurements(session: Session) -> Measurements:
    """By name."""
    return {f"tests/{name}": partial(run_file, session, Path("tests/gpu", name)) for name in _FILES}


def run_file(session: Session, path: Path) -> dict[str, Any]:
    """Numbers of tests by what became of them.

    Raises:
        AssertionError: some failed, or none could be run. TimeoutExpired: they took too long.
    """
    found = subprocess.run(
        [sys.executable, "-m", "pytest", str(path), *_FLAGS], cwd=ROOT, capture_output=True,
        text=True, timeout=session.remaining_s, check=False,
        env=os.environ | {"TRITON_INTERPRET": "0" if session.on_gpu else "1"},
    )  # fmt: skip
    if "No module named pytest" in found.stderr:
        raise UnavailableError(found.stderr.strip())
    counts = {kind: int(count) for count, kind in re.findall(r"(\d+) (\w+)", _last(found.stdout))}
    if found.returncode != 0 or not counts:
        raise AssertionError(f"{found.stdout[-8000:]}\n{found.stderr[-1000:]}")
    return counts


def _last(text: str) -> str:
    return (text.strip().splitlines() or [""])[-1]
