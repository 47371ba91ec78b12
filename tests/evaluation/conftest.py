"""The harness is installed once for all tests of a process."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.evaluation.harness import install


@pytest.fixture(scope="session")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment with the harness."""
    return install(tmp_path_factory.mktemp("lm_eval") / "venv")
