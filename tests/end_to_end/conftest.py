"""A benchmark's script as a module, named by the test's parameter; a pipe that nobody reads."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module(request.param)


@pytest.fixture
def full_pipe() -> Iterator[int]:
    """The end for writing of a pipe that holds all it can: who writes to it waits for ever."""
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    with suppress(BlockingIOError):
        while True:
            os.write(write_end, bytes(4096))
    os.set_blocking(write_end, True)
    yield write_end
    for fd in (read_end, write_end):
        os.close(fd)
