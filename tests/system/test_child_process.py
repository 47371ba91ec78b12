"""A child runs the nanocore of its parent, and nothing of the folder that both are in."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import nanocore
from nanocore.system import child_process
from nanocore.system.child_process import module_command

PACKAGE = Path(nanocore.__file__).parent
HIJACKS = 'raise SystemExit("hijacked")'
STARTS_A_CHILD = """
import os, subprocess, sys
sys.path.insert(0, sys.argv[1])
from nanocore.system.child_process import module_command
os.chdir(sys.argv[2])
subprocess.run([*module_command("nanocore.where"), "an argument"], check=True)
"""
SAYS_WHERE_IT_IS = """
import random, sys, nanocore.system, nanocore_demo_model
print(nanocore.__file__, nanocore.system.__file__, sys.argv, __name__)
"""


@pytest.fixture
def hostile(tmp_path: Path) -> Path:
    """A folder with what a child imports: of the standard library, of others, of ours."""
    folder = tmp_path / "hostile"
    (folder / "nanocore").mkdir(parents=True)
    for name in ("random", "msgspec", "nanocore_demo_model", "nanocore/__init__"):
        (folder / f"{name}.py").write_text(HIJACKS)
    return folder


def test_a_child_imports_nothing_of_the_folder_it_is_in(hostile: Path) -> None:
    command = [*module_command("nanocore.keygen"), "--help"]
    done = subprocess.run(command, cwd=hostile, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "usage: nanocore-keygen" in done.stdout
    before = [sys.executable, "-m", "nanocore.keygen"]
    hijacked = subprocess.run(before, cwd=hostile, capture_output=True, text=True, check=False)
    assert "hijacked" in hijacked.stderr


def test_a_child_runs_the_package_that_its_parent_has_found(hostile: Path, tmp_path: Path) -> None:
    """A copy that is not installed, in place of the one that is."""
    copy = tmp_path / "copy" / "nanocore"
    (copy / "system").mkdir(parents=True)
    for name in ("__init__.py", "system/__init__.py", "system/child_process.py"):
        shutil.copy(PACKAGE / name, copy / name)
    (copy / "where.py").write_text(SAYS_WHERE_IT_IS)
    command = [sys.executable, "-c", STARTS_A_CHILD, copy.parent, hostile]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    arguments = [str(copy / "where.py"), "an argument"]
    files = f"{copy / '__init__.py'} {copy / 'system' / '__init__.py'}"
    assert done.stdout == f"{files} {arguments} __main__\n"


@pytest.mark.parametrize(
    ("flags", "handed_on"), [([], []), (["-E"], ["-E"]), (["-s"], ["-s"]), (["-I"], ["-E", "-s"])]
)
def test_a_child_looks_away_from_what_its_parent_was_told_to(
    flags: list[str], handed_on: list[str]
) -> None:
    source = "from nanocore.system.child_process import module_command as of; print(*of('x')[1:-2])"
    command = [sys.executable, *flags, "-c", source]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["-P", *handed_on]


def test_no_other_module_starts_an_interpreter() -> None:
    """But for templates' process, whose path is its parent's, behind the standard library."""
    own = {Path(child_process.__file__), PACKAGE / "client" / "chat" / "renderer.py"}
    sources = {path for path in PACKAGE.rglob("*.py") if path not in own}
    assert [path for path in sources if re.search(r"sys\.executable\b", path.read_text())] == []
