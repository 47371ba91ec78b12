"""Runs of the GPU benchmark's driver on a CPU, with tiny shapes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.benchmarks_gpu.fake_parts import FakeParts

ROOT = Path(__file__).parents[2]
Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def run_driver(tmp_path: Path) -> Run:
    """Runs a subcommand; reports go to tmp_path."""

    def run(
        *flags: str, env: dict[str, str] | None = None, check: bool = True
    ) -> subprocess.CompletedProcess[str]:
        command = [
            sys.executable, "-m", "benchmarks.gpu.run", *flags,
            "--device", "cpu", "--small", "--out", str(tmp_path),
        ]  # fmt: skip
        environment = {**os.environ, "OMP_NUM_THREADS": "1", **(env or {})}
        result = subprocess.run(
            command, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=110,
            check=False,
        )  # fmt: skip
        assert not check or result.returncode == 0, result.stdout + result.stderr
        return result

    return run


@pytest.fixture
def report(tmp_path: Path) -> Callable[[str], dict[str, Any]]:
    """A subcommand's report."""

    def read(name: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((tmp_path / f"gpu-{name}.json").read_text())
        return found

    return read


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeParts:
    """A plan that measures nothing."""
    return FakeParts(monkeypatch, tmp_path)
