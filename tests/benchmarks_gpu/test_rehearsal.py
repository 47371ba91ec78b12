"""As on the day: nothing is installed, and the project is a folder within another checkout."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sysconfig
import venv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.campaign

ROOT = Path(__file__).parents[2]
Command = Callable[..., subprocess.CompletedProcess[str]]


def copy_into_another_checkout(outer: Path) -> Path:
    """Sources alone: no repository of their own, no compiled kernels."""
    copy = outer / "engines" / "ours"
    for folder in ("nanocore", "benchmarks", "tests"):
        ignored = shutil.ignore_patterns("__pycache__", "*.so")
        shutil.copytree(ROOT / folder, copy / folder, ignore=ignored)
    shutil.copy(ROOT / "pyproject.toml", copy)
    identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (["init", "-q"], [*identity, "commit", "-q", "--allow-empty", "-m", "other"]):
        subprocess.run(["git", *words], cwd=outer, check=True)
    return copy


@pytest.fixture
def run_in_copy(tmp_path: Path) -> Command:
    """Runs Python in the copy, with all of our packages but nanocore itself."""
    copy = copy_into_another_checkout(tmp_path / "outer")
    venv.create(tmp_path / "venv", with_pip=False, symlinks=True)
    site = tmp_path / "site"
    site.mkdir()
    for path in Path(sysconfig.get_path("purelib")).iterdir():
        if "nanocore" not in path.name and path.suffix != ".pth":
            (site / path.name).symlink_to(path)
    environment = os.environ | {"PYTHONPATH": str(site), "OMP_NUM_THREADS": "1"}
    environment.pop("NANOCORE_COMMIT", None)

    def run(*words: str, **changes: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [tmp_path / "venv" / "bin" / "python", *words], cwd=copy, env=environment | changes,
            capture_output=True, text=True, timeout=110, check=False,
        )  # fmt: skip

    return run


def test_the_plan_runs_in_a_copy_that_is_not_installed(
    run_in_copy: Command, tmp_path: Path
) -> None:
    alone = run_in_copy("-I", "-c", "import nanocore")
    assert "No module named 'nanocore'" in alone.stderr
    out = tmp_path / "out"
    flags = ["--out", str(out), "--work", str(tmp_path / "work"), "--device", "cpu", "--small"]
    run_in_copy("-m", "benchmarks.gpu.plan", "env", "speed", *flags)
    reports = {path.name: json.loads(path.read_text()) for path in out.iterdir()}
    assert reports.keys() == {"gpu-plan.json", "gpu-env.json", "gpu-engine.json"}
    speed: dict[str, Any] = reports["gpu-engine.json"]
    assert speed["errors"] == {}
    assert speed["missing"] == []
    assert speed["commit"] is None, "that of the checkout around it is none of ours"
    assert {name.partition("/")[0] for name in speed["measurements"]} == {"speed"}
    for path in out.iterdir():
        path.unlink()
    run_in_copy("-m", "benchmarks.gpu.plan", "env", "speed", *flags, NANOCORE_COMMIT="abc")
    again = json.loads((out / "gpu-engine.json").read_text())
    assert again["measurements"] == speed["measurements"], "the work folder has it"


def test_engine_processes_start_in_a_copy_that_is_not_installed(
    run_in_copy: Command, tmp_path: Path
) -> None:
    flags = ["--out", str(tmp_path), "--device", "cpu", "--small", "--commit", "abc"]
    result = run_in_copy("-m", "benchmarks.gpu.run", "engine", "--only", "bench/tiny-", *flags)
    assert result.returncode == 0, result.stdout + result.stderr
    found = json.loads((tmp_path / "gpu-engine.json").read_text())
    assert found["commit"] == "abc"
    assert found["measurements"].keys() == {"bench/tiny-untied"}
