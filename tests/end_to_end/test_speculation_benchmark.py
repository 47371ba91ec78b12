"""benchmarks/speculation.py measures what it says, and finds no answer that differs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.campaign

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "speculation.py"


@pytest.mark.timeout(300)
def test_two_engines_answer_the_same_requests_in_turns(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    flags = ["--tasks", "copy,json", "--repeats", "1", "--out", str(out)]
    result = subprocess.run(
        [sys.executable, str(SCRIPT), *flags], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    report = json.loads(out.read_text())
    assert (report["num_different"], report["num_requests"]) == (0, 2 * 2 * (1 + 4 + 16))
    assert len(report["tasks"]) == 6
    for found in report["tasks"].values():
        ratio = found["drafted_tokens_per_s"]["median"] / found["plain_tokens_per_s"]["median"]
        assert found["times_plain"]["median"] == pytest.approx(ratio, rel=1e-2)
        assert found["tokens_per_step"] > 0
