"""A step's result that may not be there yet."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from nanocore.worker.plan import ModelRunnerOutput


class PendingOutput(Protocol):
    """The result of a step that was begun."""

    def is_done(self) -> bool:
        """Whether `wait` would not wait."""
        ...

    def wait(self) -> ModelRunnerOutput:
        """Wait until the step is done."""
        ...


@dataclass(frozen=True, slots=True)
class DoneOutput:
    """Implements `PendingOutput` for a step that is over."""

    output: ModelRunnerOutput

    def is_done(self) -> bool:
        return True

    def wait(self) -> ModelRunnerOutput:
        return self.output


NOTHING_SAMPLED = DoneOutput(ModelRunnerOutput(rows=b"", token_ids=b""))
