"""What `make wheel` makes, made once for all the processes that run tests."""

from __future__ import annotations

import fcntl
import os
from dataclasses import dataclass
from pathlib import Path

import pytest

from nanocore import __version__
from tests.packages.environments import building
from tools.build_packages import build_packages


@dataclass(frozen=True)
class Packages:
    """Source distributions and wheels of nanocore, its demo model and its conformance kit."""

    source: Path
    wheel: Path
    demo_source: Path
    demo_wheel: Path
    kit_source: Path
    kit_wheel: Path


@pytest.fixture(scope="session")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Packages:
    """Built by the first process that asks; the others wait for it."""
    base = tmp_path_factory.getbasetemp()
    folder = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    out = folder / "packages"
    with (folder / "packages.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not out.exists():
            # What else is installed here cannot matter to setuptools; and tests/packages/
            # test_builds.py builds with what pyproject.toml says, in an environment of its own.
            build_packages(out, "--no-isolation", inherited=building())
    made = [
        next(out.glob(f"{name}-{__version__}{suffix}"))
        for name in ("nanocore_engine", "nanocore_engine_demo", "nanocore_conformance")
        for suffix in (".tar.gz", "-*.whl")
    ]
    return Packages(*made)
