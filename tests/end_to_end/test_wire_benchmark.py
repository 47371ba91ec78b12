"""The benchmark of the wire runs, compares what it says, and leaves no process behind."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.campaign

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "wire.py"
KEYS = {
    "outputs_256", "outputs_256_vllm_layout", "submit_32768_array", "submit_32768_list",
    "submit_32768_vllm_layout", "pack_32768_list", "echo", "ping", "health",
}  # fmt: skip


def test_every_figure_is_measured_twice_and_written(tmp_path: Path) -> None:
    out = tmp_path / "wire.json"
    result = subprocess.run(
        [sys.executable, str(SCRIPT), "--quick", "--out", str(out)],
        capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert "not vLLM itself" in result.stdout
    record = json.loads(out.read_text())
    assert {key: len(row["values"]) for key, row in record["figures"].items()} == dict.fromkeys(
        KEYS, 2
    )
    assert all(row["min"] > 0 for row in record["figures"].values())
    assert "not vLLM itself" in record["note"]
