"""nanocore's engine without a model: its scheduler, io thread and wire, and tokens from a list.

    NO_MODEL_TOKENS=ids.json NO_MODEL_PACE=pace python benchmarks/http_engine.py ENDPOINT

It shows clients the demo model's files, answers `no_model.token_ids` at the pace of its file, and
computes nothing. SIGTERM ends it.
"""

from __future__ import annotations

import logging
import sys
import time
from collections import deque
from collections.abc import Callable

from no_model import Pace, token_ids
from overhead_engine import BLOCK_SIZE, NUM_BLOCKS, NoModelExecutor
from overhead_wire import demo_folder

from nanocore.engine_core.config import EngineConfig
from nanocore.engine_core.io.control_handler import ServedFiles
from nanocore.engine_core.process.process import serve
from nanocore.kv_cache import Capacity
from nanocore.protocol.messages import ModelCard
from nanocore.protocol.sockets.engine_socket import bind_engine_socket
from nanocore.worker.models import load_model_config
from nanocore.worker.plan import ModelRunnerOutput, SchedulerOutput, TokenMasks


class PacedExecutor:
    """A `StepExecutor` without a worker."""

    max_concurrent_steps = 1

    def __init__(self, num_rows: int) -> None:
        self._executor = NoModelExecutor(num_rows, token_ids())
        self._pace = Pace()
        self._results: deque[ModelRunnerOutput] = deque()

    def submit(self, plan: SchedulerOutput) -> None:
        self._pace.wait()
        self._results.append(self._executor.execute(plan))

    def sample(self, masks: TokenMasks) -> None:
        raise AssertionError("nobody asks for masks")

    def collect(self) -> ModelRunnerOutput:
        return self._results.popleft()

    def blame(self) -> str:
        return "there is nothing that could hang"

    def on_failure(self, report: Callable[[str], None]) -> None:
        """Nothing can fail."""


def main() -> int:
    """Serve at the endpoint that the command line names; returns the exit code."""
    started_s = time.monotonic()
    logging.basicConfig(level=logging.WARNING)
    config = EngineConfig(
        listen=sys.argv[1], device="cpu", max_num_seqs=1024, max_num_batched_tokens=8192
    ).for_device("cpu")
    folder = demo_folder()
    model, files = load_model_config(folder, {}), ServedFiles(folder)
    card = ModelCard(
        model=str(folder), architecture=model.architecture, dtype="none",
        vocab_size=model.vocab_size, max_model_len=model.max_model_len,
        eos_token_ids=list(model.eos_token_ids), block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS,
        files=files.entries, hidden_size=model.hidden_size,
    )  # fmt: skip
    executor = PacedExecutor(config.sizes.max_num_seqs)
    socket = bind_engine_socket(sys.argv[1], None)
    capacity = Capacity(NUM_BLOCKS, BLOCK_SIZE)
    return serve(config, socket, card, capacity, files, executor, started_s)


if __name__ == "__main__":
    sys.exit(main())
