"""The checkpoints, and one run of each way to serve them, which several tests look at.

`make test-real` gives each model a process of its own. Start times are reported at the end, and
decide nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

from nanocore.client.tokenizer import Tokenizer
from nanocore.worker.loading.gguf.model_files import gguf_model_files
from tests.real.checkpoints import MODELS, checkpoint_path
from tests.real.reference import write_dequantized
from tests.real.runs import Run, run


@pytest.fixture(
    scope="session",
    params=list(MODELS),
)
def model_name(request: pytest.FixtureRequest) -> str:
    """One of MODELS whose file is there."""
    checkpoint_path(request.param)
    return request.param


@pytest.fixture(scope="session")
def path(model_name: str) -> Path:
    """The model's GGUF file."""
    return checkpoint_path(model_name)


@pytest.fixture(scope="session")
def dequantized(path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the weights that transformers reads from the file, in float32."""
    return write_dequantized(path, tmp_path_factory.mktemp("dequantized"))


@pytest.fixture(scope="session")
def tokenizer(path: Path) -> Iterator[Tokenizer]:
    """The tokenizer that engines make of the file's vocabulary."""
    made = Tokenizer(gguf_model_files(path), path.name)
    yield made
    made.close()


@pytest.fixture(scope="session")
def run_of(path: Path, dequantized: Path, tokenizer: Tokenizer) -> Callable[[str], Run]:
    """Engine outputs by way; each way's engine runs once."""

    @cache
    def once(way: str) -> Run:
        return run(path, dequantized, tokenizer, way)

    return once


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Figures that tests have recorded."""
    for report in terminalreporter.getreports("passed"):
        if report.when == "call" and "tests/real/" in report.nodeid:
            for name, value in report.user_properties:
                terminalreporter.write_line(f"{report.nodeid.partition('::')[2]}: {name} {value}")
