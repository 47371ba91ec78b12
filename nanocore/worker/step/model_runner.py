"""Runs steps on one rank: lays a plan out, launches the model, samples, appends, answers.

The host writes a step's columns, and gives a stream the work; what a step needs of the one before
it, its tokens, it takes from the tables where the model runs. So on a device the host goes on while
a step runs, and reads its result a step late. On a CPU the work is done at once, and the columns
are read where they were written. If a plan awaits masks, only its logits are computed at first.
Shape suffixes: see `nanocore.kernels.interface`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import numpy as np
import torch
from msgspec.structs import astuple
from numpy.typing import NDArray
from torch import Tensor

from nanocore.kernels.interface import Kernels
from nanocore.kernels.kv_quantization import KVCacheFormat
from nanocore.kernels.logit_edits import TokenMask
from nanocore.worker.communication.communicator import StageLinks
from nanocore.worker.layers.decoder import DecoderModel
from nanocore.worker.memory.kv_memory import KVLayout, KVMemory
from nanocore.worker.placement import Placement
from nanocore.worker.plan import NO_TOKEN, ModelRunnerOutput, SchedulerOutput, TokenMasks
from nanocore.worker.sampling.columns import SampledRows, SamplingMetadata
from nanocore.worker.sampling.slot_outputs import SlotOutputs
from nanocore.worker.step.batch_step import BatchStep, MaskedSlots, ints, running_counts
from nanocore.worker.step.drafts import DraftTracker, Proposer, Unverified, draft_columns, verify
from nanocore.worker.step.input_batch import NO_BLOCKS, AppendedBlocks, InputBatch
from nanocore.worker.step.model_stage import ModelStage
from nanocore.worker.step.pending_output import NO_OUTPUT, PendingOutput, nothing_sampled
from nanocore.worker.step.step_graphs import (
    Graph,
    Graphs,
    HostProgram,
    StepGraphs,
    graph_shapes,
    padded_steps,
)
from nanocore.worker.step.step_memory import (
    HostBounds,
    NewTokens,
    RowTables,
    StepShape,
    mask_layout,
    step_columns,
    step_layout,
)
from nanocore.worker.step.stream import HostStream, Pending, Staged, Stream, Tensors

logger = logging.getLogger(__name__)


class ModelRunner:
    """One rank's part of a model.

    Args:
        model: its weights loaded. kernels: the backend. links: to neighbouring stages.
        stream: of the device; None: the host's. enforce_eager: the host runs kernel by kernel,
            though its kernels could be captured.
        proposer: of drafts; None: there are none.
    """

    def __init__(
        self,
        model: DecoderModel,
        kernels: Kernels,
        links: StageLinks | None = None,
        stream: Stream | None = None,
        enforce_eager: bool = False,
        proposer: Proposer | None = None,
    ) -> None:
        self.model = model
        self.kernels = kernels
        self.config = model.config
        self.placement: Placement = model.placement
        self.device = model.placement.device
        self.stage = ModelStage(model, kernels, links or StageLinks())
        self.sampler = self.stage.sampler
        self.kv_memory: KVMemory | None = None
        assert proposer is None or self.placement.pp_size == 1, "stages that do not sample guess"
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
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        max_model_len: int,
    ) -> None:
        """Allocate the KV cache and the persistent batch, and compute the rotary tables."""
        # Graphs hold the addresses of the old cache and tables.
        self._graphs = self._last = None
        self.release_kv_memory()  # what both took is needed for the new ones
        layout = KVLayout(self.model.kv_specs, kv_format, block_size)
        self.kv_memory = KVMemory(layout, num_blocks, self.device)
        self.stage.kv_caches = self.kv_memory.layers()
        self.stage.rotary = self.model.rotary_tables(max_model_len)
        self.batch = InputBatch(
            max_num_seqs,
            max_model_len,
            block_size,
            self.config.vocab_size,
            self.placement.pp_size,
            0 if self.proposer is None else self.proposer.max_drafts,
        )
        self.tables = RowTables(self.batch.blocks, max_model_len, block_size, self._beside_host)
        self._drafts = DraftTracker(self.batch, self.device)
        self._stream.join()

    @torch.inference_mode()
    def capture(self, max_num_batched_tokens: int, max_graphs: int | None = None) -> None:
        """Capture steps of up to max_num_batched_tokens tokens, to be replayed from now on.

        On a device whose stream has no graph_capture kernels are compiled instead, so that no
        request waits for that. max_graphs: limit of a device's graphs, the largest first.
        """
        if self._stream.is_host:
            max_samples = self.batch.max_num_seqs * (1 + self.batch.max_drafts)
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
        return graph_shapes(support, batch.max_num_seqs, max_num_batched_tokens, batch.block_size)

    def release_kv_memory(self) -> None:
        """Give the KV cache's memory back; no step can run until there is another."""
        self.kv_memory = None
        self.stage.kv_caches = []

    @torch.inference_mode()
    def begin(self, plan: SchedulerOutput) -> PendingOutput:
        """Begin a step of the plan; only the last stage samples, and waits for masks to do so."""
        is_waiting = self._last is not None and self._last.awaits_masks
        assert not is_waiting, f"step {plan.step}: the one before it awaits masks"
        if not self.placement.is_last_stage:
            self._take_sampled(plan)
        appended = self.batch.apply(plan)
        if plan.num_tokens == 0:
            assert not plan.awaits_masks, f"step {plan.step} has no tokens and awaits masks"
            assert not plan.added, f"step {plan.step} adds rows and has no tokens"
            return nothing_sampled(plan.step)
        launch = self._lay_out(plan, appended)
        self._last = self._launch(plan, launch)
        return self._last

    def execute(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        return self.begin(plan).wait()

    def _take_sampled(self, plan: SchedulerOutput) -> None:
        # Before `apply`: rows may be removed by the same plan.
        rows = ints(plan.sampled_rows)
        if len(rows):
            self._sampled.append(
                (rows, self.batch.append_sampled(rows), ints(plan.sampled_token_ids))
            )

    def _lay_out(self, plan: SchedulerOutput, appended: AppendedBlocks) -> _Launch:
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
        shape, graph = StepShape.of(step, appended, len(slots[0])), None
        if self._graphs is not None and not needs_hidden:
            graph = self._graphs.find(shape)
        shape = shape if graph is None else graph.shape
        sampled, self._sampled = self._sampled, []
        new = NewTokens.of(plan, [np.concatenate(parts) for parts in zip(*sampled, strict=True)])
        sampling, unverified = batch.sampled_rows(step), None
        columns: dict[str, NDArray] = {"new_tokens_K": new.column}
        if self.sampler is not None:  # else the tokens come with a later plan
            batch.append(step)
            columns |= sampling.columns
            columns["slot_rows_N"], columns["slot_positions_N"] = slots[:2]
            if outputs is not None:
                columns |= outputs.columns()
        if self.proposer is not None:
            columns["corrections_X"] = self._drafts.take_corrections()
        if step.has_drafts:
            columns |= draft_columns(step)
            unverified = self._drafts.begin(step)
        staged = self._stream.stage(step_layout(shape, columns))
        staged.write(step_columns(step, appended, slots[2], shape), self.tables.spare_row)
        staged.write(columns)
        return _Launch(step, sampling, outputs, new, graph, staged, is_certain, unverified)

    def _launch(self, plan: SchedulerOutput, launch: _Launch) -> PendingOutput:
        computed: list[_Computed | None] = []
        awaits_masks = plan.awaits_masks and self.sampler is not None

        def compute() -> Tensors:
            computed.append(self._compute(launch))
            return {}

        def sample(masks: TokenMasks | None) -> Pending:
            masked = None if masks is None else self._stage_masks(masks, launch.step)

            def work() -> Tensors:
                if not awaits_masks:
                    compute()
                return self._sample(launch, computed.pop(), masked)

            return self._stream.run(work)

        if awaits_masks:
            self._stream.run(compute)
        return PendingOutput(
            plan.step, sample, lambda tensors: self._answer(launch, tensors), awaits_masks
        )

    def _compute(self, launch: _Launch) -> _Computed | None:
        """Run the model, where the stream runs; None if nobody samples here."""
        step, outputs = launch.step, launch.outputs
        memory, fields = launch.staged.to(self._beside_host)
        self.tables.take(fields["new_tokens_K"], launch.new)
        if self.proposer is not None:
            self._drafts.update(fields, launch.new, self.tables, launch.is_certain)
        drafts_D = self._propose(fields) if step.has_drafts else None
        inputs = self.tables.inputs(fields, HostBounds.of_step(step))
        self.stage.receive(len(step.positions_T))
        num_samples, hidden_NE = len(step.sample_rows), None
        if launch.graph is not None:
            result = launch.graph.run(memory, inputs)
        elif outputs is not None and outputs.needs_hidden:
            hidden_NE = self.stage.hidden(inputs)
            result = self.stage.logits(hidden_NE[:num_samples])
        else:
            result = self.stage.compute(inputs)
        if self.sampler is None:
            self.stage.send(result)
            return None
        return _Computed(fields, result[:num_samples], hidden_NE, drafts_D)

    def _propose(self, fields: Mapping[str, Tensor]) -> Tensor:
        """Write guesses behind rows' last tokens; int32 [D]."""
        assert self.proposer is not None
        places = self.tables.places(fields).of_rows(fields["drafted_D"])
        drafts_D = self.proposer.propose(*astuple(places))
        places.write(drafts_D)
        return drafts_D

    def _stage_masks(self, masks: TokenMasks, step: BatchStep) -> Callable[[], TokenMask] | None:
        """Write the masks for the stream; returns what makes them of it there."""
        masked = MaskedSlots.of(masks, step.sample_rows, self.config.vocab_size)
        if masked is None:
            return None
        words_MW, index_S = masked.words_MW, masked.index_S
        staged = self._stream.stage(mask_layout(words_MW.size, len(index_S)), phase=1)
        staged.write({"words": words_MW.ravel(), "index_S": index_S})

        def on_device() -> TokenMask:
            _, fields = staged.to(self._beside_host)
            return TokenMask(fields["words"].view(words_MW.shape), fields["index_S"])

        return on_device

    def _sample(
        self, launch: _Launch, computed: _Computed | None, masked: Callable[[], TokenMask] | None
    ) -> Tensors:
        """Sample and verify, where the stream runs, and find what else is asked for."""
        if computed is None or (len(computed.logits_SV) == 0 and computed.hidden_NE is None):
            return {}
        assert self.sampler is not None, "the last stage samples"
        fields = computed.fields
        places = self.tables.places(fields, len(computed.logits_SV))
        sampling = SamplingMetadata(launch.sampling, fields, places)
        mask = None if masked is None else masked()
        token_ids_S = self.sampler.sample(computed.logits_SV, sampling, mask)
        found = {"token_ids": token_ids_S}
        if computed.drafts_D is not None:
            columns = (fields[name] for name in ("drafted_D", "owner_O", "starts_C"))
            found["counts"] = verify(token_ids_S, computed.drafts_D, *columns)
            self._drafts.learn(fields, found["counts"])
        if launch.outputs is not None:
            found |= launch.outputs.compute(
                self.sampler,
                fields,
                self.tables.places(fields),
                computed.logits_SV,
                computed.hidden_NE,
                self.stage.logits,
                self.model.hidden_factor,
            )
        return found

    def _answer(self, launch: _Launch, found: Tensors) -> ModelRunnerOutput:
        """Make a step's output of what it left on the host."""
        if launch.unverified is not None:
            self._drafts.settle(launch.unverified, found["counts"].numpy())
        return make_output(
            launch.step.sampling_rows, launch.step.slot_counts, found, launch.outputs
        )


class _Computed(msgspec.Struct, frozen=True):
    """What a step computed before it samples, where the model runs.

    fields: its columns. logits_SV: of its sample slots. hidden_NE: of all slots, if some are not
    sampled. drafts_D: int32, if there are drafts.
    """

    fields: Mapping[str, Tensor]
    logits_SV: Tensor
    hidden_NE: Tensor | None
    drafts_D: Tensor | None


class _Launch(msgspec.Struct, frozen=True):
    """A step on the host. is_certain: see `DraftTracker`. unverified: None without drafts."""

    step: BatchStep
    sampling: SampledRows
    outputs: SlotOutputs | None
    new: NewTokens
    graph: Graph | None
    staged: Staged
    is_certain: bool
    unverified: Unverified | None


def make_output(
    rows: NDArray[np.int64],
    slot_counts: NDArray[np.int64],
    found: Tensors,
    outputs: SlotOutputs | None = None,
) -> ModelRunnerOutput:
    """Make a step's output. rows: that sampled, each with so many slots.

    found: on the host, by name; empty if the stage does not sample. "token_ids": int64 [S].
    "counts": how many of them each row gets; all, if it is not there. The other tensors are what
    outputs has.
    """
    if "token_ids" not in found:
        return NO_OUTPUT
    token_ids = delivered = found["token_ids"].numpy()
    rows_S, is_given_S = rows, None
    fields: dict[str, Any] = {}
    if "counts" in found:
        given_C, rows_S = found["counts"].numpy(), np.repeat(rows, slot_counts)
        is_given_S = running_counts(rows_S) < np.repeat(given_C, slot_counts)
        fields["counts"], delivered = given_C.astype("<i4").tobytes(), token_ids[is_given_S]
    if outputs is not None:
        has_token_S = token_ids != NO_TOKEN
        is_kept_S = has_token_S if is_given_S is None else has_token_S & is_given_S
        fields |= outputs.reported(rows_S, is_kept_S, found)
    return ModelRunnerOutput(
        rows=rows.astype("<i4").tobytes(),
        token_ids=delivered.astype("<i4").tobytes(),
        **fields,
    )
