"""Engines of all kinds start, and step, with every kernel compiled by the JIT's own path."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any, Final

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from tests.kernels.triton.compilation import covering, distinct, jobs, marks

ROOT: Final = Path(__file__).resolve().parents[3]
SETS: Final = (
    "smoke",
    "speed",
    "invariant",
    "hybrid",
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


@pytest.mark.campaign
@pytest.mark.timeout(300)
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
@pytest.mark.timeout(600)
def test_what_was_compiled_is_found_by_the_next_process(tmp_path: Path) -> None:
    flags = "tiny", "--launchers"
    [first], [second] = dry_run(tmp_path, *flags), dry_run(tmp_path, *flags)
    assert second["launched"] == first["launched"] == first["compiled"]
    assert second["compiled"] == 0
    [plain] = dry_run(tmp_path, "tiny", "--no-pdl")
    assert plain["launched"] == first["launched"]
    assert plain["launched"] / 2 < plain["compiled"] <= plain["launched"]


def test_the_versions_that_ci_compiles_with_are_the_oldest_and_the_newest_allowed() -> None:
    found = re.search(r"^TRITONS := (\S+) (\S+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert found is not None
    oldest, newest = (Version(version) for version in found.groups())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = [Requirement(text) for text in project["optional-dependencies"]["dev"]]
    [allowed] = [each.specifier for each in needed if each.name == "triton"]
    assert allowed == SpecifierSet(
        f">={oldest.major}.{oldest.minor},<{newest.major}.{newest.minor + 1}"
    )


def test_cases_that_differ_in_types_and_sizes_alone_are_compiled_once() -> None:
    every = jobs((), (90,))
    assert {*distinct(every)} < {*every}
    assert {capability for _, _, capability in distinct(every)} == {90}
    assert {module for module, _, _ in distinct(every)} == {module for module, _, _ in every}


def test_few_cases_have_every_flag_of_every_kernel() -> None:
    every = jobs((), (90,))
    assert {*covering(every)} < {*every}
    assert len(covering(every)) < len(distinct(every))
    assert set().union(*map(marks, covering(every))) == set().union(*map(marks, every))
