"""Graphs of steps, from token ids to logits: one that fits a step costs a copy and one launch.

On a device a step is captured once for each of a list of shapes, and replayed on steps padded to
the smallest that fits. Decodes have shapes of their own, and so have mixed steps of up to some
thousand tokens, whose kernels are too short to hide the host's time; larger steps run kernel by
kernel. Shapes follow from the batch's state alone (vLLM calls this full CUDA graphs). On the host
one program fits steps of any shape.
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator
from typing import Final, Protocol

import msgspec
import torch
from torch import Tensor

from nanocore.kernels.step import GraphSupport, Replay, StepInputs
from nanocore.protocol.errors import WorkerError
from nanocore.worker.step.step_memory import (
    Fields,
    HostBounds,
    RowTables,
    StepShape,
    layout_of,
    padding_columns,
)
from nanocore.worker.step.stream import GraphCapture, Staged

logger = logging.getLogger(__name__)

MIXED_TOKENS: Final = (256, 512, 1024, 2048)


class Graph(Protocol):
    """Steps up to a shape, computed without Python."""

    @property
    def shape(self) -> StepShape:
        """What the inputs are padded to."""
        ...

    def run(self, memory: Tensor, inputs: Callable[[], StepInputs]) -> Tensor:
        """Logits of a step of this shape, valid until the next call of any graph.

        memory: of the inputs, and perhaps more behind them.
        """
        ...


class Graphs(Protocol):
    """What was captured of a rank's steps."""

    def find(self, shape: StepShape) -> Graph | None:
        """The smallest graph that steps of this shape fit, if there is one."""
        ...


class HostProgram(msgspec.Struct, frozen=True):
    """Implements `Graphs` and `Graph` by what a CPU backend captures: steps of any shape."""

    replay: Replay
    shape: StepShape = StepShape(0, 0, 0, 0, is_uniform=True)

    def find(self, shape: StepShape) -> Graph:
        return HostProgram(self.replay, shape)

    def run(self, memory: Tensor, inputs: Callable[[], StepInputs]) -> Tensor:
        return self.replay(inputs())


class ShapedGraph(msgspec.Struct, frozen=True):
    """Implements `Graph` by a device's. memory: its inputs. result: where a replay leaves it."""

    shape: StepShape
    memory: Tensor
    result: Tensor
    replay: Callable[[], None]

    def run(self, memory: Tensor, inputs: Callable[[], StepInputs]) -> Tensor:
        self.memory.copy_(memory[: len(self.memory)])
        self.replay()
        return self.result


class StepGraphs:
    """Implements `Graphs` by those of a device, one for each of a list of shapes.

    Args:
        shapes: see `graph_shapes`; the smaller ones live in the memory of the first.
        compute: enqueues a step's work. tables: that it reads. device: of the inputs.

    Raises:
        WorkerError: one cannot be captured.
    """

    def __init__(
        self,
        shapes: list[StepShape],
        compute: Callable[[StepInputs], Tensor],
        graph_capture: GraphCapture,
        tables: RowTables,
        device: torch.device,
    ) -> None:
        start_s = time.monotonic()
        graph_capture.begin_set()
        graphs = [
            _capture(shape, memory, inputs, compute, graph_capture)
            for shape, memory, inputs in padded_steps(shapes, tables, device)
        ]
        self._uniform = [graph for graph in reversed(graphs) if graph.shape.is_uniform]
        self._mixed = [graph for graph in reversed(graphs) if not graph.shape.is_uniform]
        logger.info(
            "graphs %.2f s: %d of decodes, %d of mixed steps",
            time.monotonic() - start_s,
            len(self._uniform),
            len(self._mixed),
        )

    def find(self, shape: StepShape) -> Graph | None:
        graphs = self._uniform if shape.is_uniform else self._mixed
        index = bisect_left(graphs, shape.num_tokens, key=lambda graph: graph.shape.num_tokens)
        for graph in graphs[index:]:
            if _fits(shape, graph.shape):
                return graph
        return None


def padded_steps(
    shapes: list[StepShape], tables: RowTables, device: torch.device
) -> Iterator[tuple[StepShape, Tensor, StepInputs]]:
    """Steps of each shape that are nothing but padding, one after the other in the same memory on
    the device; the first is the largest.
    """
    layouts = [layout_of(shape, ()) for shape in shapes]
    memory = torch.zeros(max((x.num_bytes for x in layouts), default=0), dtype=torch.uint8)
    on_device = torch.empty_like(memory, device=device)
    for shape, layout in zip(shapes, layouts, strict=True):
        Staged.of(layout, memory).write(padding_columns(shape), tables.spare_row)
        on_device.copy_(memory)
        bounds = HostBounds.of_shape(shape, tables.max_model_len)
        inputs = tables.inputs(Fields(layout, on_device), bounds)
        yield shape, on_device[: layout.num_bytes], inputs


def graph_shapes(
    support: GraphSupport,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    block_size: int,
    max_drafts: int = 0,
    num_groups: int = 1,
) -> list[StepShape]:
    """Shapes to capture, the largest first; decodes of every row that can run are among them."""
    if support == "never":
        return []
    # Tokens of a row, and blocks that it may need for them.
    most, blocks = 1 + max_drafts, num_groups * (1 + max_drafts // block_size)
    shapes = [
        StepShape(n * most, n, n * most, n * blocks, True, most, num_groups)
        for n in decode_sizes(max_num_seqs)
    ]
    if support == "always":
        # One sequence more, for the padding: it may hold tokens when every row runs.
        num_seqs = max_num_seqs + 1
        for num_tokens in MIXED_TOKENS:
            if num_seqs < num_tokens <= max_num_batched_tokens:
                num_slots = min(num_tokens, num_seqs * most)
                num_blocks = num_groups * (num_tokens // block_size + num_seqs)
                size = num_tokens, num_seqs, num_slots, num_blocks
                shapes.append(StepShape(*size, False, most, num_groups))
    return sorted(shapes, key=lambda shape: shape.num_tokens, reverse=True)


def decode_sizes(largest: int) -> list[int]:
    """Closer together where a step is short: padding costs more there, as a share."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, largest, 32)]
    return [size for size in sizes if size < largest] + [largest]


def _fits(shape: StepShape, graph: StepShape) -> bool:
    return (
        shape.num_tokens <= graph.num_tokens
        and shape.num_seqs <= graph.num_seqs
        and shape.num_slots <= graph.num_slots
        and shape.num_blocks <= graph.num_blocks
    )


def _capture(
    shape: StepShape,
    memory: Tensor,
    inputs: StepInputs,
    compute: Callable[[StepInputs], Tensor],
    graph_capture: GraphCapture,
) -> ShapedGraph:
    try:
        result, replay = graph_capture.capture(lambda: compute(inputs))
    except Exception as error:  # whatever it is: a kernel, its compiler, memory, the driver
        kind = "decodes" if shape.is_uniform else "mixed tokens"
        raise WorkerError(
            f"no graph of {shape.num_tokens} {kind} could be captured, {type(error).__name__}: "
            f"{error}; --enforce-eager does without graphs"
        ) from error
    return ShapedGraph(shape, memory, result, replay)
