"""Engines of all kinds start, and step, with every kernel compiled by the JIT's own path."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import pytest

ROOT: Final = Path(__file__).resolve().parents[3]
SETS: Final = (
    "smoke",
    "speed",
    "invariant",
    "moe",
    "qwen3-0.6b/weights-int8",
    "qwen3-0.6b/weights-int4",
    "qwen3-0.6b/weights-fp8",
    "qwen3-0.6b/kv-int8",
    "qwen3-0.6b/kv-fp8",
)


def dry_run(cache: Path, *arguments: str) -> list[dict[str, Any]]:
    """Run sets in a process of its own, with this folder as Triton's cache."""
    environment = {name: value for name, value in os.environ.items() if "TRITON" not in name}
    result = subprocess.run(
        [sys.executable, "-m", "tests.kernels.triton.dry_run", *arguments],
        cwd=ROOT,
        env=environment | {"TRITON_CACHE_DIR": str(cache)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-4000:]
    return [json.loads(line) for line in result.stdout.splitlines()]


def test_an_engine_starts_and_compiles_nothing_later(tmp_path: Path) -> None:
    """A kernel that this version of Triton cannot compile is found here."""
    [first] = dry_run(tmp_path, "tiny")
    assert first["compiled"] == first["launched"] > 20
    assert first["late"] == []


@pytest.mark.campaign
@pytest.mark.timeout(900)
def test_engines_of_all_kinds_start_and_compile_nothing_later(tmp_path: Path) -> None:
    found = dry_run(tmp_path, *SETS)
    assert [line["set"] for line in found] == [*SETS]
    assert [line for line in found if line["launched"] < 20 or line["late"]] == []
    assert all(line["compiled"] for line in found)


@pytest.mark.campaign
def test_what_was_compiled_is_found_by_the_next_process(tmp_path: Path) -> None:
    """Without dependent launches kernels are others."""
    flags = "tiny", "--launchers"
    [first], [second] = dry_run(tmp_path, *flags), dry_run(tmp_path, *flags)
    assert second["launched"] == first["launched"] == first["compiled"]
    assert second["compiled"] == 0
    [plain] = dry_run(tmp_path, "tiny", "--no-pdl")
    assert plain["compiled"] == plain["launched"] == first["launched"]


def test_a_set_of_no_such_name_is_refused() -> None:
    command = [sys.executable, "-m", "tests.kernels.triton.dry_run", "large"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert "large: choose from tiny, smoke, speed" in result.stderr
