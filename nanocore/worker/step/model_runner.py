"""Begins steps on one rank: takes a plan's changes, lays the step out, gives its work to a stream.

The host writes a step's columns, and gives a stream the work; what a step needs of the one before
it, its tokens, it takes from the tables where the model runs. So on a device the host goes on while
a step runs, and reads its result a step late. On a CPU the work is done at once, and the columns
are read where they were written. `pending_output` has the work: run the model, sample, answer.
Shape suffixes: see `nanocore.kernels.interface`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from nanocore.kernels.interface import Kernels
from nanocore.kernels.kv_quantization import KVCacheFormat
from nanocore.worker.communication.communicator import StageLinks
from nanocore.worker.config.speculative_config import step_drafts
from nanocore.worker.layers.decoder import DecoderModel
from nanocore.worker.memory.kv_groups import KVGroup
from nanocore.worker.memory.kv_memory import KVLayout, KVMemory
from nanocore.worker.placement import Placement
from nanocore.worker.plan import ModelRunnerOutput, SchedulerOutput
from nanocore.worker.sampling.columns import kinds_of
from nanocore.worker.step.batch_step import ints
from nanocore.worker.step.drafts import DraftTracker, WorkerProposer
from nanocore.worker.step.input_batch import InputBatch
from nanocore.worker.step.model_stage import ModelStage
from nanocore.worker.step.pending_output import LaidOutStep, Machine, PendingOutput
from nanocore.worker.step.step_graphs import (
    Graphs,
    HostProgram,
    StepGraphs,
    graph_shapes,
    padded_steps,
)
from nanocore.worker.step.step_memory import (
    NO_BLOCKS,
    AppendedBlocks,
    NewTokens,
    RowTables,
    StepShape,
    layout_of,
    step_columns,
)
from nanocore.worker.step.stream import HostStream, Stream

logger = logging.getLogger(__name__)


class ModelRunner:
    """One rank's part of a model.

    Args:
        model: its weights loaded. kernels: the backend. links: to neighbouring stages.
        stream: of the device; None: the host's. enforce_eager: the host runs kernel by kernel,
            though its kernels could be captured.
        max_drafts: of a row in a step. proposer: of those that plans do not have.
    """

    def __init__(
        self,
        model: DecoderModel,
        kernels: Kernels,
        links: StageLinks | None = None,
        stream: Stream | None = None,
        enforce_eager: bool = False,
        max_drafts: int = 0,
        proposer: WorkerProposer | None = None,
    ) -> None:
        self.model = model
        self.kernels = kernels
        self.config = model.config
        self.placement: Placement = model.placement
        self.device = model.placement.device
        self.stage = ModelStage(model, kernels, links or StageLinks())
        self.sampler = self.stage.sampler
        self.kv_memory: KVMemory | None = None
        assert not max_drafts or self.placement.pp_size == 1, "stages that do not sample draft"
        self.max_drafts = max_drafts
        self.proposer = proposer
        self._stream = stream or HostStream()
        self._enforce_eager = enforce_eager
        self._beside_host = None if self._stream.is_host else self.device
        self._graphs: Graphs | None = None
        self._last: PendingOutput | None = None
        self._sampled: list[tuple[NDArray[np.int32], ...]] = []
        """Rows, positions and tokens that other stages sampled and the tables do not hold yet."""

    @torch.inference_mode()
    def allocate(
        self,
        kv_format: KVCacheFormat,
        num_slabs: int,
        block_size: int,
        max_num_seqs: int,
        max_model_len: int,
        groups: Sequence[KVGroup] = (),
    ) -> None:
        """Allocate the KV cache and the persistent batch, and compute the rotary tables."""
        # Graphs hold the addresses of the old cache and tables.
        self._graphs = self._last = None
        self.release_kv_memory()  # what both took is needed for the new ones
        own_specs = self.proposer.cache_specs if self.proposer else ()
        specs = [*self.model.cache_specs, *own_specs]
        layout = KVLayout(specs, kv_format, block_size)
        self.kv_memory = KVMemory(layout, num_slabs, self.device, groups)
        kv_caches = self.kv_memory.layers((max_num_seqs + 1, self.max_drafts))  # one is padding's
        self.stage.kv_caches = kv_caches[: len(self.model.layers)]
        self.stage.rotary = self.model.rotary_tables(max_model_len)
        self.batch = InputBatch(
            max_num_seqs,
            max_model_len,
            block_size,
            self.config.vocab_size,
            self.placement.pp_size,
            self.max_drafts,
            len(self.kv_memory.blocks),
        )
        self.tables = RowTables(self.batch.blocks, max_model_len, block_size, self._beside_host)
        tells_right = layout.has_states or self.model.predictor is not None
        self._drafts = DraftTracker(self.batch, self.proposer, self.device, tells_right)
        if self.proposer is not None:
            own = kv_caches[len(self.model.layers) :]
            self.proposer.allocate(own, self.batch, self.tables, self._drafts.excess)
        self._machine = Machine(
            self.stage, self._stream, self.tables, self._drafts, self._beside_host
        )
        self._stream.join()

    @torch.inference_mode()
    def capture(self, max_num_batched_tokens: int, max_graphs: int | None = None) -> None:
        """Capture steps of up to max_num_batched_tokens tokens, to be replayed from now on.

        On a device whose stream has no graph_capture kernels are compiled instead, so that no
        request waits for that. max_graphs: limit of a device's graphs, the largest first.
        """
        if self.proposer is not None:
            self.proposer.capture(max_num_batched_tokens, self._stream, self._enforce_eager)
        if self._stream.is_host:
            num_rows = self.batch.max_num_seqs
            max_samples = num_rows + step_drafts(num_rows, self.max_drafts)
            if not self._enforce_eager:
                replay = self.stage.capture(max_num_batched_tokens, max_samples)
                self._graphs = None if replay is None else HostProgram(replay)
            return
        shapes = self.shapes(max_num_batched_tokens)[:max_graphs]
        if self._stream.graph_capture is None:
            self._warm_up(shapes)
        else:
            capture = self._stream.graph_capture
            self._graphs = StepGraphs(shapes, self.stage.compute, capture, self.tables, self.device)
        self._stream.join()

    def _warm_up(self, shapes: list[StepShape]) -> None:
        # Steps of padding, by all stages together: hidden states pass between them.
        start_s = time.monotonic()
        for shape, _, inputs in padded_steps(shapes, self.tables, self.device):
            self.stage.receive(shape.num_tokens)
            self.stage.send(self.stage.compute(inputs))
        logger.info("kernels for %d steps, %.2f s", len(shapes), time.monotonic() - start_s)

    @property
    def is_captured(self) -> bool:
        return self._graphs is not None

    def shapes(self, max_num_batched_tokens: int) -> list[StepShape]:
        """Return the shapes that `capture` captures or compiles kernels for, the largest first."""
        if self._stream.is_host:
            return []
        support, batch = self.kernels.graph_support, self.batch
        sizes = batch.max_num_seqs, max_num_batched_tokens, batch.block_size, batch.max_drafts
        return graph_shapes(support, *sizes, len(batch.blocks.ids))

    def release_kv_memory(self) -> None:
        """Give the KV cache's memory back; no step can run until there is another."""
        self.kv_memory = None
        self.stage.kv_caches = []
        if self.proposer is not None:
            self.proposer.release_kv_memory()

    @torch.inference_mode()
    def begin(self, plan: SchedulerOutput) -> PendingOutput:
        """Begin a step of the plan; only the last stage samples, and waits for masks to do so."""
        is_waiting = self._last is not None and self._last.awaits_masks
        assert not is_waiting, f"step {plan.step}: the one before it awaits masks"
        if not self.placement.is_last_stage:
            self._take_sampled(plan)
        appended = self.batch.apply(plan)
        if self.proposer is not None:
            self.proposer.apply(plan)
        if plan.num_tokens == 0:
            assert not plan.awaits_masks, f"step {plan.step} has no tokens and awaits masks"
            assert not plan.added, f"step {plan.step} adds rows and has no tokens"
            return PendingOutput(plan.step, self._machine, None)
        laid_out = self._lay_out(plan, appended)
        awaits_masks = plan.awaits_masks and self.sampler is not None
        self._last = PendingOutput(plan.step, self._machine, laid_out, awaits_masks=awaits_masks)
        return self._last

    def execute(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        return self.begin(plan).wait()

    def _take_sampled(self, plan: SchedulerOutput) -> None:
        # Before `apply`: rows may be removed by the same plan.
        if plan.sampled_rows:
            rows, token_ids = ints(plan.sampled_rows), ints(plan.sampled_token_ids)
            self._sampled.append((rows, self.batch.append_sampled(rows), token_ids))

    def _lay_out(self, plan: SchedulerOutput, appended: AppendedBlocks) -> LaidOutStep:
        """Advance the batch, and write the step's columns for the stream."""
        batch, is_certain = self.batch, self._drafts.is_certain
        step = batch.advance(plan)
        if self._stream.is_host:
            appended = NO_BLOCKS  # its table is the batch's own
        outputs = None if self.sampler is None else batch.outputs(step)
        slots = [step.sample_rows, step.sample_positions, step.sample_index]
        needs_hidden = outputs is not None and outputs.needs_hidden
        if outputs is not None and needs_hidden:
            more = outputs.rows, outputs.positions, outputs.index
            slots = [np.concatenate(parts) for parts in zip(slots, more, strict=True)]
        shape = StepShape.of(step, appended, len(slots[0]), 1 + batch.max_drafts)
        graph = None
        if self._graphs is not None and not needs_hidden:
            graph = self._graphs.find(shape)
        shape = shape if graph is None else graph.shape
        sampled, self._sampled = self._sampled, []
        new = NewTokens.of(plan, sampled)
        sampling, unverified = batch.sampled_rows(step), self._drafts.begin(step, plan)
        columns: dict[str, NDArray] = {"new_tokens_K": new.column}
        if self.sampler is not None:  # else the tokens come with a later plan
            batch.append(step)
            columns["slot_rows_N"], columns["slot_positions_N"] = slots[:2]
            if outputs is not None:
                columns |= outputs.columns()
        columns |= self._drafts.corrections()
        if unverified is not None:
            columns |= unverified.columns
        staged = self._stream.stage(layout_of(shape, sampling.kinds + kinds_of(columns)))
        staged.write(step_columns(step, appended, slots[2], shape), self.tables.spare_row)
        staged.write(columns)
        staged.write(sampling.columns)
        return LaidOutStep(
            step=step,
            sampling=sampling,
            outputs=outputs,
            new=new,
            graph=graph,
            staged=staged,
            decode_tokens=shape.decode_tokens,
            is_certain=is_certain,
            unverified=unverified,
        )
