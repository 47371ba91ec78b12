"""What changes a row's logits before one of its tokens is chosen, in order.

A processor is for the rows that ask for it by a column of kind "logits" (`columns`). It runs behind
a step's recorded part, on the whole vocabulary and on every rank alike, and must not make the host
wait. Filters and noise come after all processors, and are one kernel of the backend.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from torch import Tensor

from nanocore.worker.sampling.columns import COLUMNS, SamplingMetadata


@dataclass(frozen=True, slots=True)
class Processor:
    """Of some columns: it runs if a row of the step asks for one of them.

    apply: from logits, float32 [R, V], to what they become; it may write over them. Rows that do
    not ask, which have the columns' defaults, keep theirs.
    """

    columns: frozenset[str]
    apply: Callable[[Tensor, SamplingMetadata], Tensor]


PROCESSORS: Final[list[Processor]] = []
"""None yet: every parameter that there is so far is a filter, or noise."""


def assert_all_is_declared() -> None:
    """Every column of kind "logits" has a processor, and processors have no other columns."""
    declared = {column.name for column in COLUMNS if column.kind == "logits"}
    processed = {name for processor in PROCESSORS for name in processor.columns}
    assert declared == processed, f"columns {declared}, but processors of {processed}"


def process(logits_RV: Tensor, metadata: SamplingMetadata) -> Tensor:
    """Logits as the rows ask for them, [R, V]; perhaps in the same memory."""
    for processor in PROCESSORS:
        if processor.columns & metadata.asked:
            logits_RV = processor.apply(logits_RV, metadata)
    return logits_RV


assert_all_is_declared()
