"""The benchmark of measuring runs, and writes what it says."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.campaign

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "measuring.py"


def test_both_targets_and_the_other_library_are_measured(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    flags = ["--streams", "4", "--tokens", "20", "--pace-ms", "1", "--reps", "2"]
    result = subprocess.run(
        [sys.executable, str(SCRIPT), *flags, "--out", str(out)],
        capture_output=True, text=True, check=False, timeout=100,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    costs = json.loads(out.read_text())["cpu_us_per_arrival"]
    assert costs.keys() == {"wire", "http", "httpx2"}
    assert all(len(cost["values"]) == 2 and cost["min"] > 0 for cost in costs.values())
    assert "wire" in result.stdout
