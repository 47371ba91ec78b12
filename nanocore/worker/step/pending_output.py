"""A step's result that may not be there yet.

A step of a plan that awaits masks has two phases: it is begun, and it samples once its masks are
known.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch

from nanocore.worker.plan import ModelRunnerOutput, TokenMasks
from nanocore.worker.step.stream import DoneWork, Pending, Tensors


class PendingOutput:
    """The result of a step that was begun.

    Args:
        step: the plan's. sample: begins what follows the logits; called once. output: of what that
            leaves on the host. awaits_masks: sampling begins when `sample` is called, and now
            otherwise.
    """

    def __init__(
        self,
        step: int,
        sample: Callable[[TokenMasks | None], Pending],
        output: Callable[[Tensors], ModelRunnerOutput],
        awaits_masks: bool = False,
    ) -> None:
        self._step = step
        self._sample: Callable[[TokenMasks | None], Pending] | None = sample
        self._output = output
        self._pending: Pending | None = None
        if not awaits_masks:
            self._begin_to_sample(None)

    @property
    def awaits_masks(self) -> bool:
        """Whether `sample` is still to be called."""
        return self._pending is None

    @torch.inference_mode()
    def sample(self, masks: TokenMasks) -> None:
        """Let a step sample whose plan awaits masks; before `wait`."""
        assert masks.step == self._step, f"masks of step {masks.step} for step {self._step}"
        assert self._pending is None, f"step {self._step} awaits no masks"
        self._begin_to_sample(masks)

    def is_done(self) -> bool:
        """Whether `wait` would return at once."""
        return self._pending is not None and self._pending.is_done()

    def wait(self) -> ModelRunnerOutput:
        """Wait for the step, and return what it sampled; once."""
        assert self._pending is not None, f"step {self._step} awaits masks"
        return self._output(self._pending.wait())

    def _begin_to_sample(self, masks: TokenMasks | None) -> None:
        assert self._sample is not None
        sample, self._sample = self._sample, None  # and the logits that it holds
        self._pending = sample(masks)


NO_OUTPUT: Final = ModelRunnerOutput(rows=b"", token_ids=b"")


def nothing_sampled(step: int) -> PendingOutput:
    return PendingOutput(step, lambda _: DoneWork(), lambda _: NO_OUTPUT)
