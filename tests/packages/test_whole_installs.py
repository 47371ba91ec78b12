"""Installs that take minutes: every dependency from the package index, and the kernels compiled."""

from __future__ import annotations

import os
import tarfile
from pathlib import Path

import pytest

from nanocore.kernels.cpu.build import INSTRUCTION_SETS, library_name
from tests.packages.conftest import Packages
from tests.packages.environments import VERSIONS, Environment, make_environment
from tests.packages.test_installed import ANSWER, ASKS_LLM, FINDS_LIBRARY

pytestmark = [pytest.mark.campaign, pytest.mark.timeout(1800)]
ROOT = Path(__file__).parents[2]
LIBRARIES = sorted(library_name(name) for name in INSTRUCTION_SETS)


def libraries(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("nanocore/**/*.so"))


@pytest.mark.parametrize("version", VERSIONS)
def test_wheels_with_all_they_need_answer(version: str, packages: Packages, tmp_path: Path) -> None:
    fresh = make_environment(tmp_path / "venv", version)
    constraints = ROOT / "constraints-cpu.txt"
    fresh.install(f"{packages.wheel}[engine,server]", packages.demo_wheel, "-c", constraints)
    answered = fresh.run("python", "-c", ASKS_LLM)
    assert answered.stdout.strip() == ANSWER
    assert "kernels cpu (" in answered.stderr


def test_a_source_distribution_installs_and_compiles_the_kernels(
    packages: Packages, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fresh = make_environment(tmp_path / "venv")
    fresh.see_packages_of_this_one()
    monkeypatch.setattr(Environment, "variables", lambda self: dict(os.environ))
    fresh.install("--no-deps", packages.source)
    assert libraries(fresh.site_packages) == LIBRARIES
    where, found = fresh.run("python", "-c", FINDS_LIBRARY).stdout.split()
    assert Path(where).is_relative_to(fresh.folder)
    assert found in INSTRUCTION_SETS


def test_an_editable_install_without_a_compiler_leaves_no_older_libraries(
    packages: Packages, tmp_path: Path
) -> None:
    with tarfile.open(packages.source) as archive:
        archive.extractall(tmp_path, filter="data")
    (source,) = tmp_path.iterdir()
    (source / "nanocore" / "kernels" / "cpu" / library_name("plain")).write_bytes(b"stale")
    fresh = make_environment(tmp_path / "venv")
    fresh.see_packages_of_this_one()
    fresh.install("--no-deps", "--editable", source)
    where, found = fresh.run("python", "-c", FINDS_LIBRARY).stdout.split()
    assert Path(where).is_relative_to(source)
    assert found == "None"
    assert libraries(source) == []
