"""The executor: what the step loop asks of its workers, whatever processes they live in.

Plans go down and results come up as msgspec structs without tensors, so that workers in other
processes stand behind the same interface. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from nanocore.worker.memory.kv_groups import KVGroup
from nanocore.worker.plan import ModelRunnerOutput, SchedulerOutput, TokenMasks
from nanocore.worker.rank_messages import WorkerInfo


class StepExecutor(Protocol):
    """Runs steps. max_concurrent_steps: how many may be submitted and not collected."""

    max_concurrent_steps: int

    def submit(self, plan: SchedulerOutput) -> None:
        """Begin a step; returns before it is done where a worker runs beside this thread."""

    def sample(self, masks: TokenMasks) -> None:
        """Let the step that awaits masks sample. No other may be submitted before, and it is
        collected after.

        So what it computes until then goes on while masks are found.
        """

    def collect(self) -> ModelRunnerOutput:
        """Wait for the oldest step that was submitted; returns the tokens it sampled.

        Raises:
            StartError: a worker failed, died or stopped answering; of the kind that exit codes
                tell.
        """

    def blame(self) -> str:
        """Clause that names what a hanging step waits for; from any thread."""

    def on_failure(self, report: Callable[[str], None]) -> None:
        """Have a worker's death reported although no step runs, from any thread."""


class Executor(StepExecutor, Protocol):
    """The workers of an engine, from their start to their end.

    They are set up by the first three calls, in this order; each returns when every rank is done.
    Errors at start are `StartError`s of the kind that decides the engine's exit code.
    """

    def load_model(self) -> None:
        """Load the weights on every rank."""

    def profile(self) -> list[WorkerInfo]:
        """Report of each rank, in order; on CUDA the largest steps are run to find out."""

    def allocate_kv_cache(
        self, num_slabs: int, max_model_len: int, groups: Sequence[KVGroup] = ()
    ) -> None:
        """Make the KV cache and the persistent batch on every rank, and capture steps to be
        replayed, or compile kernels for them.
        """

    def close(self) -> None:
        """End the workers, whatever they do; nothing else may be called afterwards."""
