"""benchmarks/sampled_step.py measures both kinds of steps, and says what it says of them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.campaign

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "sampled_step.py"


def test_steps_with_and_without_rows_that_ask_are_measured(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), "--repeats", "1", "--out", str(tmp_path / "out.json")]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    report = json.loads((tmp_path / "out.json").read_text())
    plain, asking = (figure["median"] for figure in report["step_ms"].values())
    assert report["times"] == pytest.approx(asking / plain, abs=1e-3)
    assert f"{report['times']:.2f} times" in result.stdout
