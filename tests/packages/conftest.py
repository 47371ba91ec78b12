"""What `make wheel` makes, made once for all the processes that run tests."""

from __future__ import annotations

import fcntl
import os
from dataclasses import dataclass
from pathlib import Path

import pytest

from tools.build_packages import build_packages


@dataclass(frozen=True)
class Packages:
    """Source distributions and wheels of nanocore and of its demo model."""

    source: Path
    wheel: Path
    demo_source: Path
    demo_wheel: Path


@pytest.fixture(scope="session")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Packages:
    """Built by the first process that asks; the others wait for it."""
    base = tmp_path_factory.getbasetemp()
    folder = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    out = folder / "packages"
    with (folder / "packages.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not out.exists():
            build_packages(out)
    (source,), (demo_source,) = out.glob("nanocore-*.tar.gz"), out.glob("*demo_model*.tar.gz")
    (wheel,), (demo_wheel,) = out.glob("nanocore-*.whl"), out.glob("*demo_model*.whl")
    return Packages(source, wheel, demo_source, demo_wheel)
