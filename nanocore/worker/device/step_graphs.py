"""Graphs of whole steps, by shape: a step that fits one costs a copy and one launch.

From token ids to sampled tokens everything a step computes is captured once for each of a list of
shapes, and replayed on steps padded to the smallest that fits. Decodes have shapes of their own,
and so have mixed steps of up to some thousand tokens, whose kernels are too short to hide the
host's time; larger steps run kernel by kernel. Shapes follow from the batch's state alone (vLLM
calls this full CUDA graphs).
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator
from typing import Final, Generic, Protocol, TypeVar

import msgspec
import torch
from torch import Tensor

from nanocore.kernels.step import GraphSupport
from nanocore.protocol.errors import WorkerError
from nanocore.worker.batch.batch_step import BatchStep
from nanocore.worker.device.step_memory import StagedColumns, StepFields, StepShape, num_bytes

logger = logging.getLogger(__name__)

R = TypeVar("R")

MIXED_TOKENS: Final = (256, 512, 1024, 2048)


class GraphCapture(Protocol):
    """Captures work that a device is to repeat."""

    def begin_set(self) -> None:
        """Graphs to come share memory with each other and with none before, which are gone."""
        ...

    def capture(self, work: Callable[[], R]) -> tuple[R, Callable[[], None]]:
        """Run work, perhaps several times.

        Returns its result, and what repeats it: with the same inputs and result in memory, and
        without the host.
        """
        ...


class HostBounds(msgspec.Struct, frozen=True):
    """Bounds of a step that kernels get from the host: see `AttentionMetadata`."""

    num_decodes: int
    query_start: list[int]
    seq_lens: list[int]

    @classmethod
    def of_step(cls, step: BatchStep) -> HostBounds:
        """Exact counts of a step that runs once."""
        return cls(step.order.num_decodes, step.order.query_start, step.seq_lens_B.tolist())

    @classmethod
    def of_shape(cls, shape: StepShape, max_model_len: int) -> HostBounds:
        """Upper bounds of any step of this shape."""
        num_seqs = shape.num_seqs
        starts = [0] + [shape.num_tokens] * num_seqs
        if shape.is_uniform:
            starts = list(range(num_seqs + 1))
        return cls(num_seqs, starts, [max_model_len] * num_seqs)


class Graph(msgspec.Struct, Generic[R], frozen=True):
    """One of them. fields: its inputs, on the device. result: where a replay leaves it."""

    shape: StepShape
    memory: Tensor
    fields: StepFields
    result: R
    replay: Callable[[], None]


class StepGraphs(Generic[R]):
    """All of an engine.

    Args:
        shapes: see `graph_shapes`; the smaller ones live in the memory of the first.
        compute: enqueues a step's work. spare_row: for padding. device: of the inputs.

    Raises:
        WorkerError: one cannot be captured.
    """

    def __init__(
        self,
        shapes: list[StepShape],
        compute: Callable[[StepFields, HostBounds], R],
        graph_capture: GraphCapture,
        spare_row: int,
        max_model_len: int,
        device: torch.device,
    ) -> None:
        start_s = time.monotonic()
        graph_capture.begin_set()
        graphs = [
            _capture(
                shape, memory, HostBounds.of_shape(shape, max_model_len), compute, graph_capture
            )
            for shape, memory in padded_steps(shapes, spare_row, device)
        ]
        self._uniform = [graph for graph in reversed(graphs) if graph.shape.is_uniform]
        self._mixed = [graph for graph in reversed(graphs) if not graph.shape.is_uniform]
        logger.info(
            "graphs %.2f s: %d of decodes, %d of mixed steps",
            time.monotonic() - start_s,
            len(self._uniform),
            len(self._mixed),
        )

    def find(self, shape: StepShape) -> Graph[R] | None:
        """The smallest graph that steps of this shape fit, if there is one."""
        graphs = self._uniform if shape.is_uniform else self._mixed
        index = bisect_left(graphs, shape.num_tokens, key=lambda graph: graph.shape.num_tokens)
        for graph in graphs[index:]:
            if _fits(shape, graph.shape):
                return graph
        return None


def padded_steps(
    shapes: list[StepShape], spare_row: int, device: torch.device
) -> Iterator[tuple[StepShape, Tensor]]:
    """The inputs of a step of each shape that is nothing but padding, one after the other in the
    same memory on the device; the first is the largest.
    """
    memory = torch.zeros(max(map(num_bytes, shapes), default=0), dtype=torch.uint8)
    on_device = torch.empty_like(memory, device=device)
    for shape in shapes:
        StagedColumns(memory, shape, spare_row).fill_with_padding()
        on_device.copy_(memory)
        yield shape, on_device[: num_bytes(shape)]


def graph_shapes(
    support: GraphSupport, max_num_seqs: int, max_num_batched_tokens: int, block_size: int
) -> list[StepShape]:
    """Shapes to capture, the largest first; decodes of every row that can run are among them."""
    if support == "never":
        return []
    shapes = [StepShape(n, n, n, n, is_uniform=True) for n in decode_sizes(max_num_seqs)]
    if support == "always":
        # One sequence more, for the padding: it may hold tokens when every row runs.
        num_seqs = max_num_seqs + 1
        for num_tokens in MIXED_TOKENS:
            if num_seqs < num_tokens <= max_num_batched_tokens:
                num_blocks = num_tokens // block_size + num_seqs
                shape = StepShape(num_tokens, num_seqs, num_seqs, num_blocks, is_uniform=False)
                shapes.append(shape)
    return sorted(shapes, key=lambda shape: shape.num_tokens, reverse=True)


def decode_sizes(largest: int) -> list[int]:
    """Closer together where a step is short: padding costs more there, as a share."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, largest, 32)]
    return [size for size in sizes if size < largest] + [largest]


def _fits(shape: StepShape, graph: StepShape) -> bool:
    return (
        shape.num_tokens <= graph.num_tokens
        and shape.num_seqs <= graph.num_seqs
        and shape.num_samples <= graph.num_samples
        and shape.num_blocks <= graph.num_blocks
    )


def _capture(
    shape: StepShape,
    memory: Tensor,
    bounds: HostBounds,
    compute: Callable[[StepFields, HostBounds], R],
    graph_capture: GraphCapture,
) -> Graph[R]:
    fields = StepFields.of(memory, shape)
    try:
        result, replay = graph_capture.capture(lambda: compute(fields, bounds))
    except Exception as error:  # whatever it is: a kernel, its compiler, memory, the driver
        kind = "decodes" if shape.is_uniform else "mixed tokens"
        raise WorkerError(
            f"no graph of {shape.num_tokens} {kind} could be captured, {type(error).__name__}: "
            f"{error}; --enforce-eager does without graphs"
        ) from error
    return Graph(shape, memory, fields, result, replay)
