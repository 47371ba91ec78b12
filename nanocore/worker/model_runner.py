"""Runs a step on one rank: applies the plan to the persistent batch, calls the model, samples.

On a CPU the step is over when `begin` returns; on a device beside the host, which has a stream,
`DeviceSteps` begins it there. If the plan awaits masks, only the logits are computed at first.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nanocore.kernels.interface import Kernels
from nanocore.kernels.kv_quantization import KVCacheFormat
from nanocore.worker.batch.batch_step import BatchStep, ints
from nanocore.worker.batch.input_batch import InputBatch
from nanocore.worker.communication.communicator import StageLinks
from nanocore.worker.device.device_steps import DeviceQueue, DeviceSteps
from nanocore.worker.device.stage_replay import StageReplay, capture_stage
from nanocore.worker.layers.decoder import DecoderModel
from nanocore.worker.memory.kv_memory import KVLayout, KVMemory
from nanocore.worker.model_stage import ModelStage
from nanocore.worker.pending_output import (
    NOTHING_SAMPLED,
    AwaitingOutput,
    DoneOutput,
    PendingOutput,
    make_output,
)
from nanocore.worker.placement import Placement
from nanocore.worker.plan import ModelRunnerOutput, SchedulerOutput, TokenMasks
from nanocore.worker.sampling.masked_rows import MaskedRows
from nanocore.worker.sampling.output_computer import Sampled
from nanocore.worker.sampling.requested_outputs import RequestedOutputs


class ModelRunner:
    """One rank's part of a model.

    Args:
        model: its weights loaded. kernels: the backend. links: to neighbouring stages.
        queue: None where steps are computed by the host itself. enforce_eager: call kernels one by
        one, though they could be captured.
    """

    def __init__(
        self,
        model: DecoderModel,
        kernels: Kernels,
        links: StageLinks | None = None,
        queue: DeviceQueue | None = None,
        enforce_eager: bool = False,
    ) -> None:
        self.model = model
        self.kernels = kernels
        self.config = model.config
        self.placement: Placement = model.placement
        self.device = model.placement.device
        self.stage = ModelStage(model, kernels, links or StageLinks())
        self.sampler = self.stage.sampler
        self.kv_memory: KVMemory | None = None
        self._queue = queue
        self._enforce_eager = enforce_eager
        self._device_steps: DeviceSteps | None = None
        self._replay: StageReplay | None = None
        self._last: PendingOutput = NOTHING_SAMPLED
        self._sampled: list[tuple[NDArray[np.int32], ...]] = []
        """Rows, positions and tokens that other stages sampled and the device does not know yet."""

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
        # Captured steps hold the addresses of the old cache and tables.
        self._device_steps = self._replay = None
        self._last = NOTHING_SAMPLED
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
            has_tokens=self._queue is None,
        )
        self.token_table = self.batch.token_table
        if self._queue is not None:
            steps = DeviceSteps(self.batch, self.stage, self._queue, max_model_len)
            self._device_steps = steps
            self.token_table = steps.token_table

    @torch.inference_mode()
    def capture(self, max_num_batched_tokens: int, max_graphs: int | None = None) -> None:
        """Capture steps of up to max_num_batched_tokens tokens, to be replayed from now on.

        On a device without graph_capture kernels are compiled instead, so that no request waits for
        that. max_graphs: limit of graphs, the largest first.
        """
        if self._device_steps is not None:
            self._device_steps.capture(max_num_batched_tokens, max_graphs)
        elif not self._enforce_eager:
            x_TE = self.placement.on_meta().empty(max_num_batched_tokens, self.config.hidden_size)
            self._replay = capture_stage(
                self.kernels,
                self.stage.capturable_part,
                self.stage.links,
                x_TE,
                self.batch.max_num_seqs,
            )

    @property
    def is_captured(self) -> bool:
        return self._replay is not None

    def num_graphs(self, max_num_batched_tokens: int) -> int:
        """Return how many steps `capture` captures, or compiles kernels for, on a device."""
        steps = self._device_steps
        return 0 if steps is None else len(steps.shapes(max_num_batched_tokens))

    def release_kv_memory(self) -> None:
        """Give the KV cache's memory back; no step can run until there is another."""
        self.kv_memory = None
        self.stage.kv_caches = []

    @torch.inference_mode()
    def begin(self, plan: SchedulerOutput) -> PendingOutput:
        """Begin a step of the plan; only the last stage samples, and waits for masks to do so."""
        assert not self._last.awaits_masks, f"step {plan.step}: the one before it awaits masks"
        if not self.placement.is_last_stage:
            self._take_sampled(plan)
        appended = self.batch.apply(plan)
        if plan.num_tokens == 0:
            assert not plan.awaits_masks, f"step {plan.step} has no tokens and awaits masks"
            return NOTHING_SAMPLED
        step = self.batch.advance(plan)
        if self._device_steps is None:
            self._last = self._compute(plan, step)
        else:
            sampled, self._sampled = self._sampled, []
            columns = [np.concatenate(parts) for parts in zip(*sampled, strict=True)]
            self._last = self._device_steps.begin(plan, step, appended, columns)
        return self._last

    def execute(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        return self.begin(plan).wait()

    def _take_sampled(self, plan: SchedulerOutput) -> None:
        # Before `apply`: rows may be removed by the same plan.
        rows = ints(plan.sampled_rows)
        if len(rows) == 0:
            return
        token_ids = ints(plan.sampled_token_ids)
        places = self.batch.append_sampled(rows, token_ids)
        if self._device_steps is not None:
            self._sampled.append((rows, places, token_ids))

    def _compute(self, plan: SchedulerOutput, step: BatchStep) -> PendingOutput:
        """Run a step on the host, replayed if it was captured; its output is done."""
        # If it awaits masks, no other step begins before it samples: so none overwrites its logits,
        # which are in the buffer of a replayed step.
        inputs = self.batch.inputs(step)
        requested = None if self.sampler is None else self.batch.requested(step)
        logits_RV: Tensor | None
        hidden_NE = None
        # A captured step returns the logits of rows that sample and nothing else: a step that needs
        # other hidden states runs kernel by kernel.
        if requested is not None and requested.needs_hidden:
            logits_RV, hidden_NE = self.stage.compute_logits_and_hidden(inputs, requested)
        else:
            compute = self._replay or self.stage.compute_logits
            logits_RV = compute(inputs.rows, inputs.attention, inputs.sample_index_R)

        def sample(masks: TokenMasks | None = None) -> PendingOutput:
            return self._sample(step, logits_RV, requested, hidden_NE, masks)

        if plan.awaits_masks and self.sampler is not None:
            return AwaitingOutput(plan.step, sample)
        return sample()

    def _sample(
        self,
        step: BatchStep,
        logits_RV: Tensor | None,
        requested: RequestedOutputs | None,
        hidden_NE: Tensor | None,
        masks: TokenMasks | None,
    ) -> PendingOutput:
        masked = None
        if masks is not None:
            processed = self.batch.sampled_rows(step).processed
            masked = MaskedRows.of(masks, step.sample_rows, processed, self.config.vocab_size)
        if logits_RV is None or (len(logits_RV) == 0 and hidden_NE is None):
            return NOTHING_SAMPLED
        assert self.sampler is not None, "the last stage samples"
        token_ids_R = self.sampler.sample(
            logits_RV,
            self.batch.sampled_rows(step),
            self.batch.places(step),
            None if masked is None else masked.on_host(),
        )
        self.batch.append(step.sample_rows, token_ids_R.numpy())
        result = {"token_ids": token_ids_R}
        if requested is not None:
            sampled = Sampled(logits_RV, token_ids_R, hidden_NE)
            result |= self.stage.compute_requested(
                requested, torch.from_numpy(requested.column), sampled, self.token_table
            )
        return DoneOutput(make_output(step.sample_rows, result, requested))
