"""A step's result that may not be there yet."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from nanocore.worker.plan import NO_TOKEN, ModelRunnerOutput, TokenMasks
from nanocore.worker.sampling.logprob_rows import StepLogprobs
from nanocore.worker.sampling.logprobs import told


class PendingOutput(Protocol):
    """The result of a step that was begun."""

    def sample(self, masks: TokenMasks) -> None:
        """Let a step sample whose plan awaits masks; before `wait`."""
        ...

    def is_done(self) -> bool:
        """Whether `wait` would return at once."""
        ...

    def wait(self) -> ModelRunnerOutput:
        """What the step sampled, once it is done."""
        ...


@dataclass(frozen=True, slots=True)
class DoneOutput:
    """Implements `PendingOutput` for a step that is over."""

    output: ModelRunnerOutput

    def sample(self, masks: TokenMasks) -> None:
        raise AssertionError("the step did not await masks")

    def is_done(self) -> bool:
        return True

    def wait(self) -> ModelRunnerOutput:
        return self.output


def make_output(
    rows: NDArray[np.int64], sampled: Mapping[str, Tensor], asked: StepLogprobs | None = None
) -> ModelRunnerOutput:
    """What rows sampled. sampled: on the host, by name; nothing if the stage does not sample.

    "token_ids": int64, row by row. "counts": of each row, if some has other than one. asked: for
    log probabilities, which are there too.
    """
    token_ids, counts = sampled.get("token_ids"), sampled.get("counts")
    if token_ids is None:
        return _NOTHING
    if asked is not None:
        assert counts is None, "no worker drafts yet"
    logprobs = told(asked, sampled, token_ids.numpy() != NO_TOKEN)
    return ModelRunnerOutput(
        rows=rows.astype("<i4").tobytes(),
        token_ids=token_ids.numpy().astype("<i4").tobytes(),
        counts=b"" if counts is None else counts.numpy().astype("<i4").tobytes(),
        logprobs=logprobs.logprobs,
        prompt_logprobs=logprobs.prompt_logprobs,
    )


_NOTHING: Final = ModelRunnerOutput(rows=b"", token_ids=b"")
NOTHING_SAMPLED: Final = DoneOutput(_NOTHING)
