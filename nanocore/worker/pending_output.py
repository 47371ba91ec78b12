"""A step's result that may not be there yet.

A step of a plan that awaits masks has two phases: it is begun, and it samples once its masks are
known.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import ClassVar, Final, Protocol

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nanocore.worker.plan import NO_TOKEN, ModelRunnerOutput, TokenMasks
from nanocore.worker.sampling.output_computer import requested_columns
from nanocore.worker.sampling.requested_outputs import RequestedOutputs


class PendingOutput(Protocol):
    """The result of a step that was begun."""

    @property
    def awaits_masks(self) -> bool:
        """Whether `sample` is still to be called."""
        ...

    def sample(self, masks: TokenMasks) -> None:
        """Let a step sample whose plan awaits masks; before `wait`."""
        ...

    def is_done(self) -> bool:
        """Whether `wait` would return at once."""
        ...

    def wait(self) -> ModelRunnerOutput:
        """Wait for the step, and return what it sampled."""
        ...


class DoneOutput(msgspec.Struct, frozen=True):
    """Implements `PendingOutput` for a step that is over."""

    output: ModelRunnerOutput
    awaits_masks: ClassVar[bool] = False

    def sample(self, masks: TokenMasks) -> None:
        raise AssertionError(f"step {masks.step} awaits no masks")

    def is_done(self) -> bool:
        return True

    def wait(self) -> ModelRunnerOutput:
        return self.output


class AwaitingOutput:
    """Implements `PendingOutput` for a step that samples when it gets its masks.

    Args:
        step: the plan's. sample: its second phase; called once.
    """

    def __init__(self, step: int, sample: Callable[[TokenMasks], PendingOutput]) -> None:
        self._step = step
        self._sample: Callable[[TokenMasks], PendingOutput] | None = sample
        self._sampled: PendingOutput | None = None

    @property
    def awaits_masks(self) -> bool:
        return self._sample is not None

    @torch.inference_mode()
    def sample(self, masks: TokenMasks) -> None:
        assert masks.step == self._step, f"masks of step {masks.step}, and {self._step} awaits some"
        assert self._sample is not None, f"step {self._step} has its masks"
        sample, self._sample = self._sample, None  # and the logits that it holds
        self._sampled = sample(masks)

    def is_done(self) -> bool:
        return self._sampled is not None and self._sampled.is_done()

    def wait(self) -> ModelRunnerOutput:
        assert self._sampled is not None, f"step {self._step} awaits masks"
        return self._sampled.wait()


def make_output(
    rows: NDArray[np.int64],
    sampled: Mapping[str, Tensor],
    requested: RequestedOutputs | None = None,
) -> ModelRunnerOutput:
    """Make a step's output. sampled: on the host, by name; empty if the stage does not sample.

    "token_ids": int64, row by row. "counts": of each row, if some has other than one. requested:
    what the other tensors are for.
    """
    token_ids, counts = sampled.get("token_ids"), sampled.get("counts")
    if token_ids is None:
        return _NOTHING
    if requested is not None:
        assert counts is None, "no worker drafts yet"
    columns = requested_columns(requested, sampled, token_ids.numpy() != NO_TOKEN)
    return ModelRunnerOutput(
        rows=rows.astype("<i4").tobytes(),
        token_ids=token_ids.numpy().astype("<i4").tobytes(),
        counts=b"" if counts is None else counts.numpy().astype("<i4").tobytes(),
        logprobs=columns.logprobs,
        prompt_logprobs=columns.prompt_logprobs,
        pooled_rows=columns.pooled_rows,
        pooled=columns.pooled,
    )


_NOTHING: Final = ModelRunnerOutput(rows=b"", token_ids=b"")
NOTHING_SAMPLED: Final = DoneOutput(_NOTHING)
