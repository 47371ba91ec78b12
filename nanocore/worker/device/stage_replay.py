"""A rank's part of a step on the host, captured once and replayed between other stages' messages.

What ranks of one stage exchange is captured too, where they share memory; what stages tell each
other is around it. One rank alone replays the whole step.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from nanocore.kernels.attention import AttentionMetadata
from nanocore.kernels.interface import Kernels
from nanocore.kernels.step import Replay, StepRows
from nanocore.worker.communication.communicator import StageLinks

CapturablePart = Callable[[Tensor | None, StepRows, AttentionMetadata, Tensor], Tensor]
"""Called with hidden states (None on the first stage) and a step's inputs: see `Replay`."""


class StageReplay:
    """Captured part of a stage, and its links to other stages.

    Args:
        received_TE: memory from which a later stage's part reads its hidden states.
    """

    def __init__(self, replay: Replay, links: StageLinks, received_TE: Tensor | None) -> None:
        self._replay = replay
        self._links = links
        self._received_TE = received_TE

    def __call__(
        self, rows: StepRows, metadata: AttentionMetadata, sample_index_R: Tensor
    ) -> Tensor | None:
        """The last stage's logits, valid until the next call; None of a stage before it."""
        if self._links.receive is not None and self._received_TE is not None:
            x_TE = self._received_TE[: len(rows.rows_T)]
            x_TE.copy_(self._links.receive.recv(tuple(x_TE.shape), x_TE.dtype))
        result = self._replay(rows, metadata, sample_index_R)
        if self._links.send is None:
            return result
        self._links.send.send(result)
        return None


def capture_stage(
    kernels: Kernels,
    compute: CapturablePart,
    links: StageLinks,
    largest_TE: Tensor,
    max_samples: int,
) -> StageReplay | None:
    """`compute`, a rank's part of any step, to be replayed; None if the backend cannot.

    largest_TE: has the shape and dtype of the largest step's hidden states, on whatever device.
    """
    received_TE = None if links.receive is None else torch.empty_like(largest_TE, device="cpu")

    def part(rows: StepRows, metadata: AttentionMetadata, sample_index_R: Tensor) -> Tensor:
        return compute(received_TE, rows, metadata, sample_index_R)

    replay = kernels.capture(part, len(largest_TE), max_samples)
    return None if replay is None else StageReplay(replay, links, received_TE)
