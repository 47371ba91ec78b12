"""A step's result that may not be there yet."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from nanocore.worker.plan import ModelRunnerOutput


class PendingOutput(Protocol):
    """The result of a step that was begun."""

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

    def is_done(self) -> bool:
        return True

    def wait(self) -> ModelRunnerOutput:
        return self.output


def make_output(rows: NDArray[np.int64], sampled: Mapping[str, Tensor]) -> ModelRunnerOutput:
    """What rows sampled. sampled: on the host, by name; nothing if the stage does not sample.

    "token_ids": int64, row by row. "counts": of each row, if some has other than one.
    """
    token_ids, counts = sampled.get("token_ids"), sampled.get("counts")
    if token_ids is None:
        return _NOTHING
    return ModelRunnerOutput(
        rows=rows.astype("<i4").tobytes(),
        token_ids=token_ids.numpy().astype("<i4").tobytes(),
        counts=b"" if counts is None else counts.numpy().astype("<i4").tobytes(),
    )


_NOTHING: Final = ModelRunnerOutput(rows=b"", token_ids=b"")
NOTHING_SAMPLED: Final = DoneOutput(_NOTHING)
