"""What goes into the kernels when a source distribution is built: our flags, and no Python's."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.packages.conftest import Packages
from tests.packages.environments import UNREACHABLE, building, find_python
from tests.packages.test_contents import LIBRARIES, contents

pytestmark = [pytest.mark.campaign, pytest.mark.timeout(1800)]


def wheel_of(packages: Packages, out: Path, python: str, **variables: str) -> Path:
    """Built of the source distribution by this Python's pip."""
    done = subprocess.run(
        [python, "-m", "pip", "wheel", "-q", "--no-deps", "-w", out, packages.source],
        env=building(**variables),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode and any(text in done.stderr for text in UNREACHABLE):
        pytest.skip(f"the package index cannot be reached: {done.stderr}")
    assert done.returncode == 0, done.stderr
    (wheel,) = out.iterdir()
    return wheel


def test_another_python_compiles_the_same_bytes(packages: Packages, tmp_path: Path) -> None:
    """By the same command, that is: then they come from the cache, and by another one anew."""
    python = find_python("3.12")
    if python is None:
        pytest.skip("there is no Python 3.12 here")
    made = contents(wheel_of(packages, tmp_path, python))
    ours = contents(packages.wheel)
    assert {name: made[name] for name in LIBRARIES} == {name: ours[name] for name in LIBRARIES}


def test_kernels_are_left_out_where_that_is_asked_for(packages: Packages, tmp_path: Path) -> None:
    wheel = wheel_of(packages, tmp_path, sys.executable, NANOCORE_NO_KERNELS="1")
    assert not LIBRARIES & contents(wheel).keys()
    assert wheel.name.endswith("-py3-none-any.whl")
