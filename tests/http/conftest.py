"""Fixtures of the HTTP server's tests; an engine with the demo model for all that talk to one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from nanocore.demo_model import demo_model_folder
from tests.client.conftest import (
    endpoint,
    pytest_pyfunc_call,
    tokenizer,
    tokenizer_folder,
)
from tests.end_to_end.forked import engine

__all__ = ["demo_endpoint", "endpoint", "pytest_pyfunc_call", "tokenizer", "tokenizer_folder"]
DEMO_MODEL = demo_model_folder()


@pytest.fixture(scope="package")
def demo_endpoint() -> Iterator[str]:
    """Where it listens."""
    with engine(DEMO_MODEL, "--dtype", "float32") as running:
        yield running.endpoint
