"""The demo model's tokenizer, and dataset files."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from nanocore.client.tokenizer import Tokenizer
from nanocore.demo_model import demo_model_folder
from tests.end_to_end.forked import engine

DEMO_MODEL = demo_model_folder()
MakeFile = Callable[[str], str]


@pytest.fixture(scope="session")
def demo_tokenizer() -> Iterator[Tokenizer]:
    tokenizer = Tokenizer.from_folder(DEMO_MODEL)
    yield tokenizer
    tokenizer.close()


@pytest.fixture(scope="session")
def demo_endpoint() -> Iterator[str]:
    """Where an engine with the demo model listens."""
    with engine(DEMO_MODEL, "--dtype", "float32") as running:
        yield running.endpoint


@pytest.fixture
def dataset_file(tmp_path: Path) -> MakeFile:
    """Writes a text, and returns its path."""

    def make(text: str) -> str:
        path = tmp_path / "dataset"
        path.write_text(text, "utf-8")
        return str(path)

    return make
