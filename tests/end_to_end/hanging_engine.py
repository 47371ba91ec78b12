"""An engine process whose executor hangs when it is told to: everything else is real.

    main([HOW, *flags of nanocore-engine])

A step that begins a prompt whose first token is HANG never ends. HOW: "waiting" waits as Python
does, "holding-the-lock" is native code that keeps the interpreter's lock. Other steps sample token
0 for every row, one row at a time.
"""

from __future__ import annotations

import ctypes
import logging
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import numpy as np

from nanocore.engine_core.cli import parse_config
from nanocore.engine_core.io.control_handler import ServedFiles
from nanocore.engine_core.process import process
from nanocore.kv_cache import Capacity
from nanocore.protocol.messages import ModelCard
from nanocore.protocol.sockets.engine_socket import bind_engine_socket
from nanocore.system.standard_streams import LogHandler
from nanocore.worker.plan import ModelRunnerOutput, SchedulerOutput, TokenMasks

HANG = 13
SAMPLED = 0


class HangingExecutor:
    """Implements `StepExecutor` for engines of one row."""

    max_concurrent_steps = 1

    def __init__(self, how: str) -> None:
        self._how = how
        self._num_left = 0  # tokens of the prompt that are not computed
        self._result = ModelRunnerOutput(rows=b"", token_ids=b"")

    def submit(self, plan: SchedulerOutput) -> None:
        for new in plan.added:
            token_ids = np.frombuffer(new.token_ids, "<i4")
            if token_ids[0] == HANG:
                self._hang()
            self._num_left = len(token_ids) - new.num_computed_tokens
        self._num_left -= plan.num_tokens
        rows = [0] if plan.num_tokens and self._num_left <= 0 else []
        self._result = ModelRunnerOutput(
            rows=np.array(rows, "<i4").tobytes(),
            token_ids=np.array([SAMPLED] * len(rows), "<i4").tobytes(),
        )

    def sample(self, masks: TokenMasks) -> None:
        raise AssertionError("no step awaits masks")

    def collect(self) -> ModelRunnerOutput:
        return self._result

    def blame(self) -> str:
        return "the executor of this test hangs"

    def on_failure(self, report: Callable[[str], None]) -> None: ...

    def _hang(self) -> None:
        while self._how == "holding-the-lock":
            ctypes.PyDLL(None).pause()  # a signal's handler ends it, and it begins again
        threading.Event().wait()


def main(arguments: list[str]) -> NoReturn:
    how, *flags = arguments
    logging.basicConfig(level=logging.INFO, handlers=[LogHandler()])
    if how == "holding-the-lock":
        process.GRACE_S = 1.0  # nobody can say goodbye: why wait for it
    config = parse_config(flags)
    card = ModelCard(
        model="none",
        architecture="Hanging",
        dtype="none",
        vocab_size=50,
        max_model_len=64,
        eos_token_ids=[],
        block_size=16,
        num_blocks=8,
    )
    socket = bind_engine_socket(config.endpoint)
    executor = HangingExecutor(how)
    files, started_at = ServedFiles(Path("/nowhere")), time.monotonic()
    capacity = Capacity(card.num_blocks, card.block_size)
    sys.exit(process.serve(config, socket, card, capacity, files, executor, started_at))


if __name__ == "__main__":
    main(sys.argv[1:])
