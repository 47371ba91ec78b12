"""Packages that only some benchmarks need: of the extra `bench`."""

from __future__ import annotations

from importlib.util import find_spec

from nanocore.protocol.errors import ConfigError


def require(package: str, need: str) -> None:
    """Raises ConfigError unless it is installed. need: what it is for, as a subject."""
    if find_spec(package) is None:
        raise ConfigError(f"{need} needs {package}: in the repository, pip install '.[bench]'")
