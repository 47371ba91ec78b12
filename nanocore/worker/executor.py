"""The executor: what the step loop asks of its workers, whatever processes they live in.

Plans go down and results come up as msgspec structs without tensors, so that workers in other
processes can stand behind the same interface. Imports no torch.
"""

from __future__ import annotations

from typing import Protocol

from nanocore.protocol.plan import ModelRunnerOutput, SchedulerOutput


class Executor(Protocol):
    """Runs steps."""

    def execute(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        """Run one step; returns the tokens it sampled."""
        ...
