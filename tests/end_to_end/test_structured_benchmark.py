"""benchmarks/structured_outputs.py measures all its parts, and writes what it says."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from nanocore.demo_model import demo_model_folder

pytestmark = pytest.mark.campaign

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "structured_outputs.py"
DEMO_MODEL = demo_model_folder()


@pytest.mark.timeout(300)
def test_steps_schemas_and_bystanders_are_measured(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    flags = ["--model", str(DEMO_MODEL), "--repeats", "1", "--schemas", "3", "--out", str(out)]
    result = subprocess.run(
        [sys.executable, str(SCRIPT), *flags], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    report = json.loads(out.read_text())
    step = report["step"]
    ratio = step["structured_ms"]["median"] / step["plain_ms"]["median"]
    assert step["times_plain"]["median"] == pytest.approx(ratio, rel=1e-2)
    assert {found["num_values"] for found in report["schema"].values()} == {3}
    assert report["evil"]["beside_evil_itl_ms"]["num_values"] > 1000
    assert sum(report["evil"]["outcomes"].values()) >= 1
