"""Fixtures of the protocol's tests."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def short_path() -> Iterator[Path]:
    """A private directory whose path is short enough for a Unix socket, unlike tmp_path's."""
    with tempfile.TemporaryDirectory(prefix="nc-", dir="/tmp") as directory:
        yield Path(directory)


@pytest.fixture
def endpoint(short_path: Path) -> str:
    """An ipc endpoint that nobody serves."""
    return f"ipc://{short_path}/engine.sock"
