"""An engine process without a model: everything is real but the executor, which answers at once.

    python benchmarks/no_model_engine.py --parent-fd FD [flags of nanocore-engine]

For measuring what the engine's own bookkeeping costs; `overhead_client.py` starts it. It announces
the demo model's folder, so that clients detokenize with that model's tokenizer, and every request's
output is the same real text, read in a circle. It ends with the process that started it.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray
from sample_text import TEXT, demo_folder

from nanocore.client.tokenizer import Tokenizer
from nanocore.engine_core.cli import parse_config
from nanocore.engine_core.io.model_files import ModelFiles
from nanocore.engine_core.process.parent import ParentLink
from nanocore.engine_core.process.process import serve
from nanocore.protocol.messages import ModelCard
from nanocore.protocol.sockets import EngineSocket
from nanocore.worker.plan import ModelRunnerOutput, SchedulerOutput

TOKEN_DTYPE = np.dtype("<i4")
NUM_BLOCKS = 65536
MAX_MODEL_LEN = 65536


class NoModelExecutor:
    """Answers one token for each row whose known tokens are all computed; vectorised over rows.

    Args:
        num_rows: rows that plans may name. text_ids: the tokens it answers, by position.
    """

    def __init__(self, num_rows: int, text_ids: list[int]) -> None:
        self._text_ids = np.array(text_ids, TOKEN_DTYPE)
        self._active = np.zeros(num_rows, bool)
        self._num_tokens = np.zeros(num_rows, np.int64)
        self._num_computed = np.zeros(num_rows, np.int64)
        self._counts = np.zeros(num_rows, np.int64)

    max_concurrent_steps = 1

    def submit(self, plan: SchedulerOutput) -> None:
        """Run the step at once."""
        self._result = self.execute(plan)

    def collect(self) -> ModelRunnerOutput:
        """The result of the one step that is in flight."""
        return self._result

    def blame(self) -> str:
        """Nothing can hang."""
        return "the benchmark's executor hangs"

    def on_failure(self, report: Callable[[str], None]) -> None:
        """Nothing can fail."""

    def execute(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        """Apply the plan's differences and answer."""
        self._active[_column(plan.removed_rows)] = False
        for new in plan.added:
            self._active[new.row] = True
            self._num_tokens[new.row] = len(new.token_ids) // TOKEN_DTYPE.itemsize
            self._num_computed[new.row] = new.num_computed_tokens
        np.copyto(self._counts, self._active)
        self._counts[_column(plan.chunk_rows)] = _column(plan.chunk_counts)
        self._num_computed += self._counts
        sampled = (self._counts > 0) & (self._num_computed >= self._num_tokens)
        (rows,) = np.nonzero(sampled)
        token_ids = self._text_ids[self._num_tokens[rows] % len(self._text_ids)]
        self._num_tokens[rows] += 1
        return ModelRunnerOutput(
            rows=rows.astype(TOKEN_DTYPE).tobytes(), token_ids=token_ids.tobytes()
        )


def _column(column: bytes) -> NDArray[np.int32]:
    return np.frombuffer(column, TOKEN_DTYPE)


def main() -> int:
    """Serve until told to stop, or until the parent is gone; returns the exit code."""
    started_s = time.monotonic()
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--parent-fd", type=int, required=True)
    arguments, flags = parser.parse_known_args()
    parent = ParentLink(arguments.parent_fd)
    config = parse_config(flags)
    tokenizer = Tokenizer.from_folder(demo_folder())
    files = ModelFiles(demo_folder())
    card = ModelCard(
        model=str(demo_folder()),
        architecture="NoModel",
        dtype="none",
        vocab_size=tokenizer.backend.get_vocab_size(),
        max_model_len=MAX_MODEL_LEN,
        eos_token_ids=[],
        block_size=config.sizes.block_size,
        num_blocks=NUM_BLOCKS,
        files=files.entries,
    )
    executor = NoModelExecutor(config.sizes.max_num_seqs, tokenizer.encode(TEXT))
    socket = EngineSocket(config.endpoint)
    return serve(config, socket, card, files, executor, started_s, parent=parent)


if __name__ == "__main__":
    sys.exit(main())
