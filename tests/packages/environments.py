"""Fresh environments of any Python, into which what was built is installed as a user would.

Programs in them find no compiler and nothing of the repository: PATH is the environment's own, and
the working folder is empty.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import pytest

VERSIONS = ("3.11", "3.12", "3.13", "3.14")
"""Of Python; tests of those that this machine lacks are skipped, and say so."""
USERS_CACHE = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
"""Asked before tests get a cache of their own."""
UNREACHABLE = ("Could not find a version", "No matching distribution", "NewConnectionError")


def building(**others: str) -> dict[str, str]:
    """Environment variables of builds: the user's cache has the compiled kernels."""
    return {**os.environ, "XDG_CACHE_HOME": USERS_CACHE, **others}


@dataclass(frozen=True)
class Environment:
    """A virtual environment without pip: this process' pip installs into it."""

    folder: Path

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    @property
    def site_packages(self) -> Path:
        (found,) = self.folder.glob("lib/python3*/site-packages")
        return found

    def variables(self, **others: str) -> dict[str, str]:
        """Of its programs: no others' packages, no compiler."""
        dropped = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "CC", "CXX")
        kept = {name: value for name, value in os.environ.items() if name not in dropped}
        return {**kept, "PATH": str(self.folder / "bin"), **others}

    def install(self, *arguments: str | Path) -> None:
        """By `pip install`; skips the test where the package index cannot be reached."""
        pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", self.python)
        command = (*pip, "install", "--quiet", *arguments)
        done = self.run(*command, check=False, XDG_CACHE_HOME=USERS_CACHE)
        if done.returncode and any(text in done.stderr for text in UNREACHABLE):
            pytest.skip(f"the package index cannot be reached: {done.stderr}")
        assert done.returncode == 0, done.stderr

    def run(
        self, *command: str | Path, check: bool = True, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        """A program, in an empty folder of the environment's; one of its own by its name."""
        program, *arguments = command
        own = self.folder / "bin" / program
        folder = self.folder / "empty"
        folder.mkdir(exist_ok=True)
        done = subprocess.run(
            [own if own.exists() else program, *arguments],
            env=self.variables() | variables,
            cwd=folder,
            capture_output=True,
            text=True,
            check=False,
        )
        assert not check or done.returncode == 0, done.stderr
        return done

    def see_packages_of_this_one(self) -> None:
        """Let it import what is installed here, torch for one, and not what is editable here."""
        (self.site_packages / "outer.pth").write_text(sysconfig.get_path("purelib"))


def make_environment(folder: Path, version: str | None = None) -> Environment:
    """A fresh one, of a Python of this version; skips the test where there is none."""
    python = sys.executable if version is None else find_python(version)
    if python is None:
        pytest.skip(f"there is no Python {version} here")
    subprocess.run([python, "-m", "venv", "--without-pip", folder], check=True)
    return Environment(folder)


def find_python(version: str) -> str | None:
    """The interpreter, if one is in PATH, or one of pyenv's."""
    if version == f"{sys.version_info.major}.{sys.version_info.minor}":
        return sys.executable
    found = shutil.which(f"python{version}")
    if found is None:
        return None
    asked = subprocess.run(
        [found, "-c", "import sys; print(sys.executable)"],
        env={**os.environ, "PYENV_VERSION": version},
        capture_output=True,
        text=True,
        check=False,
    )
    return asked.stdout.strip() if asked.returncode == 0 else None
