"""Fixtures of the protocol's tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.client.conftest import pytest_pyfunc_call as pytest_pyfunc_call  # coroutines are run


@pytest.fixture
def endpoint(short_path: Path) -> str:
    """An ipc endpoint that nobody serves."""
    return f"ipc://{short_path}/engine.sock"
