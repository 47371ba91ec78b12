"""Fixtures of the client's tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from nanocore.client.tokenizer import Tokenizer
from tests.tiny_models import write_byte_tokenizer


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the byte tokenizer's files, not to be written to."""
    folder = tmp_path_factory.mktemp("tokenizer")
    write_byte_tokenizer(folder)
    return folder


@pytest.fixture(scope="session")
def tokenizer(tokenizer_folder: Path) -> Tokenizer:
    """The byte tokenizer: one token per byte."""
    return Tokenizer.from_folder(tokenizer_folder)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the byte tokenizer's files, to be changed by the test."""
    write_byte_tokenizer(tmp_path)
    return tmp_path


@pytest.fixture
def endpoint(short_path: Path) -> str:
    """An ipc endpoint that nobody serves."""
    return f"ipc://{short_path}/engine.sock"
