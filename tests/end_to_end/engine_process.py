"""A standalone `nanocore-engine` for tests: started as a user would start it."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

EXIT_TIMEOUT_S = 60.0


@dataclass
class Engine:
    """A running engine. stderr: the file its log goes to."""

    process: subprocess.Popen[bytes]
    endpoint: str
    stderr: Path


def command(*flags: str) -> list[str]:
    """The command line of an engine."""
    return [sys.executable, "-m", "nanocore.engine_core", *flags]


@contextmanager
def engine(model: Path, *flags: str, endpoint: str | None = None) -> Iterator[Engine]:
    """Start an engine, by default at a private endpoint; clients can connect at once, and wait."""
    with tempfile.TemporaryDirectory(prefix="nc-") as directory:
        folder = Path(directory) / "e"
        endpoint = endpoint or f"ipc://{folder / 'engine.sock'}"
        stderr = Path(directory) / "log"
        with stderr.open("wb") as log:
            process = subprocess.Popen(
                command("--model", str(model), "--listen", endpoint, *flags), stderr=log
            )
        try:
            yield Engine(process, endpoint, stderr)
        finally:
            process.terminate()
            process.wait(EXIT_TIMEOUT_S)
