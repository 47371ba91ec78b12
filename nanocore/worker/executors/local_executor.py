"""The executor that runs the model in the engine's own process: one rank."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from nanocore.worker.device.device import steps_in_flight
from nanocore.worker.messages import WorkerConfig, WorkerInfo
from nanocore.worker.pending_output import PendingOutput
from nanocore.worker.plan import ModelRunnerOutput, SchedulerOutput, TokenMasks
from nanocore.worker.worker import Worker


class LocalExecutor:
    """Implements `Executor` with a worker in this process.

    A CPU runs a step when it is submitted, a GPU while the step loop goes on.

    Raises:
        StartError: see `Worker`.
    """

    def __init__(self, config: WorkerConfig) -> None:
        self._worker = Worker(config)
        self.max_concurrent_steps = steps_in_flight(config, self._worker.device)
        self._steps: deque[PendingOutput] = deque()

    def load_model(self) -> None:
        self._worker.load_model()

    def profile(self) -> list[WorkerInfo]:
        return [self._worker.profile()]

    def allocate_kv_cache(self, num_blocks: int, max_model_len: int) -> None:
        self._worker.allocate_kv_cache(num_blocks, max_model_len)

    def capture(self) -> None:
        self._worker.capture()

    def submit(self, plan: SchedulerOutput) -> None:
        self._steps.append(self._worker.begin(plan))

    def sample(self, masks: TokenMasks) -> None:
        self._steps[-1].sample(masks)

    def collect(self) -> ModelRunnerOutput:
        return self._steps.popleft().wait()

    def blame(self) -> str:
        return "it hangs in the engine's own process, whose log has the stacks of its threads"

    def on_failure(self, report: Callable[[str], None]) -> None:
        """Nothing can die here without the engine."""

    def close(self) -> None:
        """The worker ends with the process."""
