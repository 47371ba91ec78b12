"""What stands in a model's place in both engines: the tokens of a text, at a pace.

It imports nothing beyond the standard library, so that an interpreter of vLLM can use it. The
environment names two files: of the token ids, and of the seconds that a step takes, which whoever
measures may change while engines run.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
import time
from pathlib import Path
from typing import Final

TOKENS_VARIABLE: Final = "NO_MODEL_TOKENS"
PACE_VARIABLE: Final = "NO_MODEL_PACE"
_SECONDS: Final = struct.Struct("d")


def write_pace(path: Path, step_s: float) -> None:
    """Let steps of the engines that look there take so long from now on; 0: no time at all."""
    with path.open("r+b" if path.exists() else "wb") as file:  # the same file: it is mapped
        file.write(_SECONDS.pack(step_s))


def token_ids() -> list[int]:
    """What the model says, by position, in a circle."""
    ids: list[int] = json.loads(Path(os.environ[TOKENS_VARIABLE]).read_text())
    return ids


class Pace:
    """Makes steps as long as the file says."""

    def __init__(self) -> None:
        with open(os.environ[PACE_VARIABLE], "rb") as file:
            self._memory = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
        self._due_s = 0.0

    def delay_s(self) -> float:
        """How long the step that is asked for has to wait; those that follow each other begin at
        equal intervals."""
        (step_s,) = _SECONDS.unpack_from(self._memory)
        now_s = time.monotonic()
        self._due_s = max(self._due_s + step_s, now_s)
        return self._due_s - now_s

    def wait(self) -> None:
        """To be called in each step."""
        delay_s = self.delay_s()
        if delay_s > 0:
            time.sleep(delay_s)
