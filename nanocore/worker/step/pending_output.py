"""A step that was begun: its work, which a stream runs, and its result, which may not be there yet.

A step of a plan that awaits masks has two phases: the model is run, and it samples once its masks
are known. Shape suffixes: see `nanocore.kernels.interface`; further, N slots, S of them sampled.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nanocore.kernels.logit_edits import TokenMask
from nanocore.kernels.step import StepInputs
from nanocore.worker.plan import NO_TOKEN, ModelRunnerOutput, TokenMasks
from nanocore.worker.sampling.columns import SampledRows, SamplingMetadata, kinds_of
from nanocore.worker.sampling.slot_outputs import SlotOutputs
from nanocore.worker.step.batch_step import BatchStep, MaskedSlots, running_counts
from nanocore.worker.step.drafts import DraftTracker, Unverified, verify
from nanocore.worker.step.model_stage import ModelStage
from nanocore.worker.step.step_graphs import Graph
from nanocore.worker.step.step_memory import HostBounds, NewTokens, RowTables, layout_of
from nanocore.worker.step.stream import DoneWork, Pending, Staged, Stream, Tensors


class Machine(msgspec.Struct, frozen=True):
    """What runs steps. device: None where that is the host."""

    stage: ModelStage
    stream: Stream
    tables: RowTables
    drafts: DraftTracker
    device: torch.device | None


class LaidOutStep(msgspec.Struct, frozen=True):
    """A step on the host, its columns staged.

    outputs, graph: None if there is none. is_certain, unverified: see `DraftTracker`.
    """

    step: BatchStep
    sampling: SampledRows
    outputs: SlotOutputs | None
    new: NewTokens
    graph: Graph | None
    staged: Staged
    decode_tokens: int
    is_certain: bool
    unverified: Unverified | None


class _Computed(msgspec.Struct, frozen=True):
    """What a step computed before it samples, where the model runs.

    fields: its columns. logits_SV: of its sample slots. hidden_NE: of all slots, if some are not
    sampled. drafts_D: int32, if there are drafts.
    """

    fields: Mapping[str, Tensor]
    logits_SV: Tensor
    hidden_NE: Tensor | None
    drafts_D: Tensor | None


class PendingOutput:
    """The result of a step that was begun.

    Args:
        number: the plan's. laid_out: None of a step without tokens, which is done. awaits_masks: it
            samples when `sample` is called, and now otherwise.
    """

    def __init__(
        self,
        number: int,
        machine: Machine,
        laid_out: LaidOutStep | None,
        *,
        awaits_masks: bool = False,
    ) -> None:
        self.number = number
        self._machine = machine
        self._laid_out = laid_out
        self._computed: _Computed | None = None
        self._pending: Pending | None = None
        if laid_out is None:
            self._pending = DoneWork()
        elif awaits_masks:
            machine.stream.run(self._compute)
        else:
            self._pending = machine.stream.run(self._compute_and_sample)

    @property
    def awaits_masks(self) -> bool:
        """Whether `sample` is still to be called."""
        return self._pending is None

    @torch.inference_mode()
    def sample(self, masks: TokenMasks) -> None:
        """Let a step sample whose plan awaits masks; before `wait`."""
        assert masks.step == self.number, f"masks of step {masks.step} for step {self.number}"
        assert self._pending is None, f"step {self.number} awaits no masks"
        mask = self._stage_masks(masks)
        self._pending = self._machine.stream.run(lambda: self._sample(mask))

    def is_done(self) -> bool:
        """Whether `wait` would return at once."""
        return self._pending is not None and self._pending.is_done()

    def wait(self) -> ModelRunnerOutput:
        """Wait for the step, and return what it sampled; once."""
        assert self._pending is not None, f"step {self.number} awaits masks"
        found, laid_out = self._pending.wait(), self._laid_out
        if laid_out is None:
            return _NO_OUTPUT
        if laid_out.unverified is not None:
            self._machine.drafts.settle(laid_out.unverified, found["counts"].numpy())
        step = laid_out.step
        return make_output(step.sampling_rows, step.slot_counts, found, laid_out.outputs)

    def _stage_masks(self, masks: TokenMasks) -> Callable[[], TokenMask] | None:
        """Write the masks for the stream; returns what makes them of it there."""
        machine, stage = self._machine, self._machine.stage
        assert self._laid_out is not None
        rows = self._laid_out.step.sample_rows
        masked = MaskedSlots.of(masks, rows, stage.model.config.vocab_size)
        if masked is None:
            return None
        shape = masked.words_MW.shape
        columns = {"words": masked.words_MW.ravel(), "index_S": masked.index_S}
        staged = machine.stream.stage(layout_of(None, kinds_of(columns)), phase=1)
        staged.write(columns)

        def on_device() -> TokenMask:
            _, fields = staged.to(machine.device)
            return TokenMask(fields["words"].view(shape), fields["index_S"])

        return on_device

    # From here on where the stream runs, and perhaps later than the host goes on.

    def _compute_and_sample(self) -> Tensors:
        self._compute()
        return self._sample(None)

    def _compute(self) -> Tensors:
        """Run the model."""
        laid_out, machine, tables = self._laid_out, self._machine, self._machine.tables
        assert laid_out is not None
        step, outputs, stage = laid_out.step, laid_out.outputs, machine.stage
        memory, fields = laid_out.staged.to(machine.device)
        tables.take(fields["new_tokens_K"], laid_out.new)
        machine.drafts.update(fields, laid_out.new, tables, laid_out.is_certain)
        drafts_D = None
        if (unverified := laid_out.unverified) is not None:
            is_certain = laid_out.is_certain
            drafts_D = machine.drafts.propose(unverified, fields, tables, is_certain)

        def inputs() -> StepInputs:
            return tables.inputs(fields, HostBounds.of_step(step, laid_out.decode_tokens))

        stage.receive(len(step.positions_T))
        num_samples, hidden_NE = len(step.sample_rows), None
        if laid_out.graph is not None:
            result = laid_out.graph.run(memory, inputs)
        elif outputs is not None and outputs.needs_hidden:
            hidden_NE = stage.hidden(inputs())
            result = stage.logits(hidden_NE[:num_samples])
        else:
            result = stage.compute(inputs())
        if stage.sampler is None:
            stage.send(result)
        else:
            self._computed = _Computed(fields, result[:num_samples], hidden_NE, drafts_D)
        return {}

    def _sample(self, mask: Callable[[], TokenMask] | None) -> Tensors:
        """Sample and verify, and find what else is asked for."""
        laid_out, machine, stage = self._laid_out, self._machine, self._machine.stage
        computed, self._computed = self._computed, None  # and the logits that it holds
        if computed is None or (computed.logits_SV.shape[0] == 0 and computed.hidden_NE is None):
            return {}
        assert laid_out is not None
        assert stage.sampler is not None, "the last stage samples"
        fields, logits_SV = computed.fields, computed.logits_SV
        num_slots = None if computed.hidden_NE is None else len(logits_SV)
        places = machine.tables.places(fields, num_slots)
        sampling = SamplingMetadata(laid_out.sampling, fields, places)
        token_ids_S = stage.sampler.sample(logits_SV, sampling, None if mask is None else mask())
        found = {"token_ids": token_ids_S}
        if computed.drafts_D is not None:
            columns = (fields[name] for name in ("drafted_D", "row_of_S", "starts_C"))
            found["counts"] = verify(token_ids_S, computed.drafts_D, *columns)
            machine.drafts.learn(fields, found["counts"])
        if laid_out.outputs is not None:
            found |= laid_out.outputs.compute(
                stage.sampler,
                fields,
                machine.tables.places(fields),
                logits_SV,
                computed.hidden_NE,
                stage.logits,
                stage.model.hidden_factor,
            )
        return found


_INT32: Final = np.dtype("<i4")
_NO_OUTPUT: Final = ModelRunnerOutput(rows=b"", token_ids=b"")


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
        return _NO_OUTPUT
    token_ids = delivered = found["token_ids"].numpy()
    rows_S, is_given_S = rows, None
    fields: dict[str, Any] = {}
    if "counts" in found:
        given_C, rows_S = found["counts"].numpy(), np.repeat(rows, slot_counts)
        is_given_S = running_counts(rows_S) < np.repeat(given_C, slot_counts)
        fields["counts"], delivered = given_C.astype(_INT32).tobytes(), token_ids[is_given_S]
    if outputs is not None:
        has_token_S = token_ids != NO_TOKEN
        is_kept_S = has_token_S if is_given_S is None else has_token_S & is_given_S
        fields |= outputs.reported(rows_S, is_kept_S, found)
    return ModelRunnerOutput(
        rows=rows.astype(_INT32).tobytes(),
        token_ids=delivered.astype(_INT32).tobytes(),
        **fields,
    )
