"""Steps on a device beside the host: begun in order, replayed as graphs where one fits, read late.

The host packs a step's differences and columns into pinned memory, enqueues one copy and the work,
and goes on; what a step needs of the one before it, its tokens, it takes from the tables on the
device. Of a step that awaits masks all rows' plain tokens are found, and what comes behind that is
enqueued when the masks are known; no other step begins before. Nothing here waits for the device.
Shape suffixes: see `nanocore.kernels.interface`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import ClassVar

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nanocore.kernels.attention import AttentionMetadata
from nanocore.kernels.logit_edits import TokenLists, TokenMask
from nanocore.worker.batch.batch_step import BatchStep
from nanocore.worker.batch.block_table import AppendedBlocks
from nanocore.worker.batch.input_batch import InputBatch
from nanocore.worker.device.device_stream import Pending, StagingBuffer, Stream, Tensors
from nanocore.worker.device.step_graphs import (
    GraphCapture,
    HostBounds,
    StepGraphs,
    graph_shapes,
    padded_steps,
)
from nanocore.worker.device.step_memory import (
    DeviceRows,
    NewTokens,
    StagedColumns,
    StepFields,
    StepShape,
    num_bytes,
)
from nanocore.worker.model_stage import ModelStage
from nanocore.worker.pending_output import AwaitingOutput, PendingOutput, make_output
from nanocore.worker.plan import ModelRunnerOutput, SchedulerOutput, TokenMasks
from nanocore.worker.sampling.columns import SampledRows, SamplingMetadata
from nanocore.worker.sampling.masked_rows import MaskedRows
from nanocore.worker.sampling.output_computer import Sampled
from nanocore.worker.sampling.requested_outputs import RequestedOutputs

logger = logging.getLogger(__name__)


class PendingStep(msgspec.Struct, frozen=True):
    """A step that was begun to its end. Implements `pending_output.PendingOutput`."""

    rows: NDArray[np.int64]
    sampled: Pending
    requested: RequestedOutputs | None
    awaits_masks: ClassVar[bool] = False

    def sample(self, masks: TokenMasks) -> None:
        raise AssertionError(f"step {masks.step} awaits no masks")

    def is_done(self) -> bool:
        return self.sampled.is_done()

    def wait(self) -> ModelRunnerOutput:
        return make_output(self.rows, self.sampled.wait(), self.requested)


class DeviceQueue(msgspec.Struct, frozen=True):
    """Work queue of a device beside the host. graph_capture: None to run kernel by kernel."""

    stream: Stream
    graph_capture: GraphCapture | None = None


class DeviceSteps:
    """Begins steps. batch: the rows on the host. stage: the model, on the queue's device."""

    def __init__(
        self, batch: InputBatch, stage: ModelStage, queue: DeviceQueue, max_model_len: int
    ) -> None:
        self._batch = batch
        self._stage = stage
        self._sampler = stage.sampler
        self._stream = queue.stream
        self._graph_capture = queue.graph_capture
        self._device = stage.model.placement.device
        num_rows, block_size = batch.max_num_seqs, batch.block_size
        self._rows = DeviceRows(num_rows, max_model_len, block_size, self._device)
        self._graphs: StepGraphs[Sampled | None] | None = None
        self._stream.join()

    @property
    def token_table(self) -> Tensor:
        """Tokens of all rows, on the device."""
        return self._rows.token_table

    def shapes(self, max_num_batched_tokens: int) -> list[StepShape]:
        """Return the shapes that `capture` captures or compiles kernels for, the largest first."""
        num_rows, block_size = self._batch.max_num_seqs, self._batch.block_size
        support = self._stage.kernels.graph_support
        return graph_shapes(support, num_rows, max_num_batched_tokens, block_size)

    def capture(self, max_num_batched_tokens: int, max_graphs: int | None) -> None:
        """Capture steps, to be replayed from now on; without graphs compile kernels for them."""
        shapes, rows = self.shapes(max_num_batched_tokens)[:max_graphs], self._rows
        if self._graph_capture is None:
            self._warm_up(shapes)
        else:
            self._graphs = StepGraphs(
                shapes,
                self._compute,
                self._graph_capture,
                rows.spare_row,
                rows.max_model_len,
                self._device,
            )
        self._stream.join()

    def _warm_up(self, shapes: list[StepShape]) -> None:
        # Steps of padding, by all stages together: hidden states pass between them.
        start_s = time.monotonic()
        max_model_len = self._rows.max_model_len
        for shape, memory in padded_steps(shapes, self._rows.spare_row, self._device):
            fields = StepFields.of(memory, shape)
            self._compute(fields, HostBounds.of_shape(shape, max_model_len))
        logger.info("kernels for %d steps, %.2f s", len(shapes), time.monotonic() - start_s)

    def begin(
        self,
        plan: SchedulerOutput,
        step: BatchStep,
        appended: AppendedBlocks,
        sampled: list[NDArray[np.int32]],
    ) -> PendingOutput:
        """Enqueue a step. appended: blocks that rows got. sampled: see `NewTokens`."""
        new = NewTokens.of(plan, sampled)
        shape = StepShape.of(step, appended)
        requested = None if self._sampler is None else self._batch.requested(step)
        graph = None
        if self._graphs is not None and (requested is None or not requested.needs_hidden):
            graph = self._graphs.find(shape)
        layout = shape if graph is None else graph.shape
        sampling = self._batch.sampled_rows(step)
        size = num_bytes(layout)
        extra = _Extra(
            None if requested is None else requested.column,
            [part.column for part in (new, sampling.packed) if part is not None],
        )
        buffer = self._stream.stage(size + extra.num_bytes)
        staged = buffer.memory[: size + extra.num_bytes]
        columns = self._columns(buffer, layout, is_graph=graph is not None)
        columns.fill(step, appended, sampling)
        extra.write(staged[size:])

        def compute() -> _Computed | None:
            if graph is None:
                memory = staged.to(self._device, non_blocking=True)
                inputs, tail = StepFields.of(memory, shape), memory[size:]
            else:
                graph.memory.copy_(staged[:size], non_blocking=True)
                inputs, tail = graph.fields, staged[size:]
            numbers, tokens = extra.split(tail, self._device)
            if new is not None:
                self._rows.take(tokens[: len(new.column)], new)
            if graph is None:
                result = self._compute(inputs, HostBounds.of_step(step), requested, numbers)
            else:
                graph.replay()
                result = graph.result
            return None if result is None else _Computed(inputs, result, numbers, tokens)

        if self._sampler is not None:  # else the tokens come with a later plan
            self._batch.append(step.sample_rows, None)
        begun = _Begun(step.sample_rows, sampling, requested, compute)
        if plan.awaits_masks and self._sampler is not None:
            computed = self._run_first(begun)
            return AwaitingOutput(plan.step, lambda masks: self._run_rest(begun, computed, masks))
        return begun.pending(self._stream.run(lambda: self._finish(begun, compute())))

    def _run_first(self, begun: _Begun) -> list[_Computed | None]:
        """Enqueue a step without what masks are for; what it computed will be in the list."""
        computed: list[_Computed | None] = []

        def work() -> Tensors:
            computed.append(begun.compute())
            return {}

        self._stream.run(work)
        return computed

    def _run_rest(
        self, begun: _Begun, computed: list[_Computed | None], masks: TokenMasks
    ) -> PendingStep:
        assert self._sampler is not None
        masked = MaskedRows.of(
            masks, begun.rows, begun.sampling.processed, self._sampler.vocab_size
        )
        size = 0 if masked is None else masked.num_bytes
        staged = self._stream.stage(size, phase=1).memory[:size]
        if masked is not None:
            masked.write(staged)

        def work() -> Tensors:
            on_device = None
            if masked is not None:
                on_device = masked.of_staged(staged.to(self._device, non_blocking=True))
            return self._finish(begun, computed[0], on_device)

        return begun.pending(self._stream.run(work))

    def _finish(
        self,
        begun: _Begun,
        computed: _Computed | None,
        masked: tuple[TokenMask, Tensor] | None = None,
    ) -> Tensors:
        if computed is None:
            return {}
        if masked is not None or len(begun.sampling.processed):
            self._sample_anew(computed, begun.sampling, masked)
        sampled = {"token_ids": computed.result.token_ids_R[: len(begun.rows)]}
        if begun.requested is not None:
            sampled |= self._stage.compute_requested(
                begun.requested, computed.numbers, computed.result, self._rows.token_table
            )
        return sampled

    def _columns(self, buffer: StagingBuffer, shape: StepShape, is_graph: bool) -> StagedColumns:
        key = shape, self._rows.spare_row
        columns: StagedColumns | None = buffer.scratch.get(key)
        if columns is None:
            columns = StagedColumns(buffer.memory, *key)
            if is_graph:
                buffer.scratch[key] = columns
        return columns

    def _compute(
        self,
        step: StepFields,
        bounds: HostBounds,
        requested: RequestedOutputs | None = None,
        column: Tensor | None = None,
    ) -> Sampled | None:
        """All of a step but for what rows ask beside a plain token: that is never captured.

        requested, column: what needs hidden states beside those that sample, if anything does.
        """
        begun = self._stage.begin_step(self._rows.of_step(step))
        metadata = AttentionMetadata(
            num_decodes=bounds.num_decodes,
            query_start=bounds.query_start,
            seq_lens=bounds.seq_lens,
            num_decodes_1=step.num_decodes_1,
            query_start_A=step.query_start_A,
            seq_lens_B=step.seq_lens_B,
            block_table=begun.block_table,
            positions_T=step.positions_T,
            slot_mapping_T=step.slots_T,
            table_rows_B=begun.table_rows_B,
        )
        index, num_samples = step.sample_index_R, len(step.sample_index_R)
        if requested is not None and requested.needs_hidden:
            assert column is not None
            index = torch.cat((index, requested.hidden_index(column)))
        hidden = self._stage.forward(begun.x_TE, metadata, index)
        if hidden is None:
            return None
        assert self._sampler is not None, "a stage with logits samples"
        logits_RV = self._stage.logits(hidden[:num_samples])
        sampling = self._sampling(step)
        token_ids_R = self._sampler.sample_plain(logits_RV, sampling.noise, sampling.places)
        return Sampled(logits_RV, token_ids_R, hidden[num_samples:] if requested else None)

    def _sample_anew(
        self, step: _Computed, rows: SampledRows, masked: tuple[TokenMask, Tensor] | None
    ) -> None:
        """Sample for rows that have masks or ask for more, in place of their plain tokens."""
        assert self._sampler is not None
        logits_RV, token_ids_R = step.result.logits_RV, step.result.token_ids_R
        lists = mask = None
        if rows.packed is not None:
            lists = TokenLists.of(step.tokens[-len(rows.packed.column) :], rows.packed.sizes)
        sampling = self._sampling(step.inputs, lists)
        if masked is not None:
            mask, index_K = masked
            if len(index_K):
                token_ids_R[index_K] = self._sampler.sample_plain(
                    logits_RV[index_K], sampling.of_rows(index_K).noise, mask=mask.of_rows(index_K)
                )
        if len(rows.processed):
            index_P = step.inputs.processed_R[: len(rows.processed)]
            token_ids_R[index_P] = self._sampler.sample_processed(
                logits_RV[index_P],
                sampling.of_rows(index_P),
                None if mask is None else mask.of_rows(index_P),
            )
        sampling.places.write(token_ids_R)

    def _sampling(self, step: StepFields, lists: TokenLists | None = None) -> SamplingMetadata:
        return SamplingMetadata(step.sampling, self._rows.places(step), lists)


class _Computed(msgspec.Struct, frozen=True):
    """Results of a step on the device, behind its plain tokens.

    numbers, tokens: see `_Extra`; the tokens end with the rows' lists.
    """

    inputs: StepFields
    result: Sampled
    numbers: Tensor
    tokens: Tensor


class _Begun(msgspec.Struct, frozen=True):
    """A step on the host. compute: enqueues it as far as plain tokens; None: it samples none."""

    rows: NDArray[np.int64]
    sampling: SampledRows
    requested: RequestedOutputs | None
    compute: Callable[[], _Computed | None]

    def pending(self, sampled: Pending) -> PendingStep:
        return PendingStep(self.rows, sampled, self.requested)


class _Extra(msgspec.Struct, frozen=True):
    """Inputs that only some steps have, staged behind the fields, which end aligned.

    numbers: what is asked for beside tokens. tokens: those of rows that begin, and then those
    that rows' lists name.
    """

    numbers: NDArray[np.int64] | None
    tokens: list[NDArray[np.int32]]

    @property
    def num_bytes(self) -> int:
        num_bytes = sum([column.nbytes for column in self.tokens])
        return num_bytes if self.numbers is None else num_bytes + self.numbers.nbytes

    def write(self, staged: Tensor) -> None:
        numbers, tokens = self.split(staged, staged.device)
        if self.numbers is not None:
            numbers.numpy()[:] = self.numbers
        if self.tokens:
            np.concatenate(self.tokens, out=tokens.numpy())

    def split(self, staged: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
        """(numbers, tokens) of these bytes, on the device."""
        if len(staged):
            staged = staged.to(device, non_blocking=True)
        size = 0 if self.numbers is None else self.numbers.nbytes
        return staged[:size].view(torch.int64), staged[size:].view(torch.int32)
