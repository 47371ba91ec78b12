"""What tests of the engine core share."""

from __future__ import annotations

from pathlib import Path

import pytest

from nanocore.engine_core.io.model_files import ModelFiles
from tests.engine_core.scripted_io import TOKENIZER, Io


@pytest.fixture
def files(tmp_path: Path) -> ModelFiles:
    (tmp_path / "tokenizer.json").write_bytes(TOKENIZER)
    (tmp_path / "config.json").write_text("{}")
    return ModelFiles(tmp_path)


@pytest.fixture
def io(files: ModelFiles) -> Io:
    return Io(files)
