"""The benchmark of cost beside the model runs, ends, and leaves no process behind."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytestmark = pytest.mark.campaign

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "benchmarks" / "overhead.py"


def run_script(*flags: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SCRIPT), *flags],
        capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip


def measure(out: Path, *flags: str) -> tuple[dict[str, Any], str]:
    result = run_script("--repeats", "1", "--out", str(out), *flags)
    assert result.returncode == 0, result.stderr
    return json.loads(out.read_text()), result.stdout


def test_beginnings_of_keys_choose_what_is_measured_in_each_pass(tmp_path: Path) -> None:
    report, table = measure(
        tmp_path / "out.json", "--passes", "2", "--only", "step_1,outputs,client"
    )
    assert "steady decode step" in table
    assert {key: len(row["values"]) for key, row in report["nanocore"].items()} == {
        "step_1": 2,
        "outputs_256": 2,
        "outputs_1024": 2,
        "client_256": 2,
    }
    assert all(row["min"] > 0 for row in report["nanocore"].values())
    assert report["host"]["cores"] >= 1


def test_another_checkout_is_measured_beside_this_one(tmp_path: Path) -> None:
    report, table = measure(
        tmp_path / "out.json", "--passes", "1", "--only", "submit_2048", "--before", str(ROOT)
    )
    assert "before, times" in table
    assert report["nanocore"].keys() == report["before"].keys() == {"submit_2048"}


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--only", "step,stap"], "unknown stap; known: step_1"),
        (["--before", "/nowhere"], "/nowhere: no checkout"),
        (["--vllm-python", "/nowhere"], "/nowhere: not an executable"),
    ],
)
def test_what_is_not_known_is_a_usage_error(flags: list[str], message: str) -> None:
    result = run_script(*flags)
    assert result.returncode == 2
    assert message in result.stderr


def test_a_side_that_cannot_be_measured_is_an_error_with_its_command(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    flags = ["--passes", "1", "--repeats", "1", "--only", "step_1", "--out", str(out)]
    result = run_script(*flags, "--vllm-python", "false")
    assert result.returncode == 1
    assert "overhead_vllm.py" in result.stderr
    assert "ended with exit code 1" in result.stderr
    assert not out.exists()


@pytest.mark.parametrize("benchmark", ["overhead_engine"], indirect=True)
def test_steps_and_admission_are_measured(benchmark: ModuleType) -> None:
    figures = [
        benchmark.step_us(3, 2),
        benchmark.admit_us(64, 2),
        benchmark.admit_us(64, 2, cached=True),
    ]
    assert [len(values) for values in figures] == [2] * len(figures)
    assert all(value > 0 for values in figures for value in values)


@pytest.mark.parametrize("benchmark", ["overhead_wire"], indirect=True)
def test_messages_are_measured(benchmark: ModuleType) -> None:
    figures = [
        benchmark.submit_us(2, 2),
        benchmark.client_us_per_token(2, 2),
        benchmark.outputs_us(2, 2),
    ]
    assert [len(values) for values in figures] == [2] * 3
    assert all(value > 0 for values in figures for value in values)
