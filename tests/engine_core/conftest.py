"""What tests of the engine core share."""

from __future__ import annotations

from pathlib import Path

import pytest

from nanocore.engine_core.io.control_handler import ServedFiles
from tests.engine_core.scripted_io import TOKENIZER, Io


@pytest.fixture
def files(tmp_path: Path) -> ServedFiles:
    (tmp_path / "tokenizer.json").write_bytes(TOKENIZER)
    (tmp_path / "config.json").write_text("{}")
    return ServedFiles(tmp_path)


@pytest.fixture
def io(files: ServedFiles) -> Io:
    return Io(files)
