"""Drafts: tokens that a step computes beside a row's last one, and verifies.

A row with d drafts samples behind its last token and behind each draft. What it samples is its own
as long as every draft before was what it sampled there: so it gets one token to d + 1, the same
that it would get without drafts (Leviathan et al. 2023, for noise that is a function of seed and
position). A device keeps how many of the tokens that the host gave a row were wrong, until the host
knows it too: so a step can be begun before the one before it is verified.
Shape suffixes: see `nanocore.kernels.interface`; further, C rows that sample, S sample slots,
D drafts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final, Protocol

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nanocore.kernels.sampling import TokenPlaces
from nanocore.kernels.states import LayerCache
from nanocore.worker.memory.kv_memory import CacheSpec
from nanocore.worker.plan import NO_TOKEN, SchedulerOutput
from nanocore.worker.step.batch_step import BatchStep, ints
from nanocore.worker.step.input_batch import InputBatch
from nanocore.worker.step.step_memory import NewTokens, RowTables
from nanocore.worker.step.stream import Stream


class Proposal(msgspec.Struct, frozen=True):
    """Drafts of a step that are to be guessed.

    columns: what that needs, written by the host with the step's columns. guess: is given these
    where the model runs, the places of D drafts, and whether the host was certain of the rows'
    tokens; returns int32 [D], without waiting for the device. Places of a row are in their order,
    behind its last token; all before is in the table. All ranks must return the same.
    """

    columns: dict[str, NDArray]
    guess: Callable[[Mapping[str, Tensor], TokenPlaces, bool], Tensor]


class WorkerProposer(Protocol):
    """Guesses tokens where the model runs, for plans that leave that to it.

    cache_specs: layers of its own, whose K and V lie in the blocks of the model's full group.
    """

    @property
    def cache_specs(self) -> Sequence[CacheSpec]: ...

    def allocate(
        self, kv_caches: list[LayerCache], batch: InputBatch, tables: RowTables, excess: Tensor
    ) -> None:
        """Begin anew. kv_caches: of its layers. tables, excess: where the model runs, see there."""
        ...

    def release_kv_memory(self) -> None:
        """Give up the views of the KV cache."""
        ...

    def capture(self, max_num_batched_tokens: int, stream: Stream, enforce_eager: bool) -> None:
        """Capture its own steps, or compile for them, as `ModelRunner.capture` does."""
        ...

    def apply(self, plan: SchedulerOutput) -> None:
        """Take in rows and blocks of any plan, which the batch has taken in."""
        ...

    def begin_row(self, row: int) -> None:
        """Learn, where the model runs, that a row begins anew."""
        ...

    def propose(self, step: BatchStep) -> Proposal:
        """Begin to guess the drafts of a step."""
        ...

    def settle(self, rows: NDArray[np.int64], num_wrong: NDArray[np.int64]) -> None:
        """Learn that so many of the last tokens that it computed for rows were wrong."""
        ...


def _draft_columns(step: BatchStep, plan: SchedulerOutput) -> dict[str, NDArray]:
    """Columns of a step with drafts: which slots have one behind them, and whose slots they are.

    planned_D: the drafts, if the plan has them: its rows are in the slots' order.
    """
    ends_C = np.cumsum(step.slot_counts)
    has_draft_S = np.ones(len(step.sample_rows), bool)
    has_draft_S[ends_C - 1] = False
    planned_D = ints(plan.draft_token_ids)
    num_drafts = len(step.sample_rows) - len(step.sampling_rows)
    assert len(planned_D) in (0, num_drafts), f"step {plan.step}: {len(planned_D)} drafts"
    return {
        **({"planned_D": planned_D} if len(planned_D) else {}),
        "drafted_D": has_draft_S.nonzero()[0],
        "row_of_S": np.repeat(np.arange(len(ends_C)), step.slot_counts),
        "starts_C": ends_C - step.slot_counts,
        "sampling_rows_C": step.sampling_rows,
        "slot_counts_C": step.slot_counts,
    }


def verify(
    token_ids_S: Tensor, drafts_D: Tensor, drafted_D: Tensor, row_of_S: Tensor, starts_C: Tensor
) -> Tensor:
    """Count how many of its slots' tokens each row gets, int64 [C].

    NO_TOKEN behind a draft is left out: the row's next step begins with it, and so it ends as it
    would without drafts, also if it is a grammar that allows nothing more.

    token_ids_S: sampled. drafts_D: the token that was computed behind slot drafted_D. row_of_S:
    which of the C rows a slot is of; starts_C: the row's first slot.
    """
    num_slots = len(token_ids_S)
    is_last_S = torch.ones_like(token_ids_S, dtype=torch.bool)
    is_last_S[drafted_D] = token_ids_S[drafted_D] != drafts_D
    index_S = torch.arange(num_slots, device=token_ids_S.device)
    last_C = torch.full_like(starts_C, num_slots)
    last_C.scatter_reduce_(0, row_of_S, index_S.masked_fill_(~is_last_S, num_slots), "amin")
    counts_C = last_C - starts_C
    return counts_C + ((token_ids_S[last_C] != NO_TOKEN) | (counts_C == 0))


_NO_CORRECTION: Final = np.zeros(0, np.int64), np.zeros(0, np.int64)


class Unverified(msgspec.Struct, frozen=True):
    """A step's rows on the host, until it is known how many tokens they got.

    columns: of the step. proposal: None if the plan has the drafts.
    """

    rows: NDArray[np.int64]
    owners: NDArray[np.int64]
    slot_counts: NDArray[np.int64]
    columns: dict[str, NDArray]
    proposal: Proposal | None


class DraftTracker:
    """Keeps host and device right about rows whose drafts are wrong.

    Args:
        batch: the host's counts; if its rows have no drafts, nothing is done here.
        proposer: of drafts that plans do not have. device: where the model runs. tells_right: steps
            are told how many of their rows' last drafts were right, which states and MTP heads ask.

    excess: int64, of each row, how many of the tokens that the host gave it there are not.
    _right: likewise how many of the drafts that its last step ended with were right.
    """

    def __init__(
        self,
        batch: InputBatch,
        proposer: WorkerProposer | None,
        device: torch.device,
        tells_right: bool,
    ) -> None:
        self._batch = batch
        self._proposer = proposer
        self._tells_right = tells_right
        self._num_unverified = 0
        self._corrections: list[tuple[NDArray[np.int64], NDArray[np.int64]]] = []
        self.excess = torch.zeros(batch.max_num_seqs + 1, dtype=torch.int64, device=device)
        self._right = torch.zeros_like(self.excess)

    @property
    def is_certain(self) -> bool:
        """Whether the host knows how many tokens every row has."""
        return self._num_unverified == 0

    def begin(self, step: BatchStep, plan: SchedulerOutput) -> Unverified | None:
        """Begin a step's drafts; `settle` ends it. None: it has none."""
        if not step.has_drafts:
            return None
        columns, proposal = _draft_columns(step, plan), None
        if not plan.draft_token_ids:
            assert self._proposer is not None, "a plan leaves drafts to a worker that has none"
            proposal = self._proposer.propose(step)
            columns |= proposal.columns
        self._num_unverified += 1
        rows = step.sampling_rows
        return Unverified(rows, self._batch.owner[rows], step.slot_counts, columns, proposal)

    def settle(self, step: Unverified, counts: NDArray[np.int64]) -> None:
        """The host hears how many tokens the rows got."""
        self._num_unverified -= 1
        # Rows that another request has by now began anew, here and on the device.
        is_same = self._batch.owner[step.rows] == step.owners
        rows, excess = step.rows[is_same], (step.slot_counts - counts)[is_same]
        self._batch.correct(rows, excess)
        self._corrections.append((rows, excess))
        if self._proposer is not None:
            # It did not compute the last draft, unless a later step has it already.
            self._proposer.settle(rows, (excess - self.is_certain).clip(min=0))

    def corrections(self) -> dict[str, NDArray]:
        """Columns of the next step: what the device is to forget, as rows and then counts."""
        if not self._batch.max_drafts:
            return {}
        corrections, self._corrections = [_NO_CORRECTION, *self._corrections], []
        parts = [np.concatenate(part) for part in zip(*corrections, strict=True)]
        return {"corrections_X": np.concatenate(parts)}

    def update(
        self, fields: Mapping[str, Tensor], new: NewTokens, tables: RowTables, is_certain: bool
    ) -> None:
        """On the device, before a step: forget what the host knows by now, and rows that begin.

        Unless the host was certain, its positions, slots and lengths, which it gave as if every
        draft was right, become those of what there is.
        """
        if not self._batch.max_drafts:
            return
        rows, counts = fields["corrections_X"].view(2, -1)
        self.excess.index_add_(0, rows, -counts)
        for row, *_ in new.rows:
            self.excess[row] = self._right[row] = 0
            if self._proposer is not None:
                self._proposer.begin_row(row)
        if self._tells_right:
            rows_B = fields["rows_B"]
            fields["num_right_B"].copy_(self._right[rows_B])
            self._right[rows_B] = 0
        if not is_certain:
            fields["positions_T"].sub_(self.excess[fields["rows_T"]])
            fields["seq_lens_B"].sub_(self.excess[fields["rows_B"]])
            fields["slot_positions_N"].sub_(self.excess[fields["slot_rows_N"]])
            tables.find_slots(fields)

    def propose(
        self, step: Unverified, fields: Mapping[str, Tensor], tables: RowTables, is_certain: bool
    ) -> Tensor:
        """On the device: write the drafts behind rows' last tokens; int32 [D]."""
        places = tables.places(fields).of_rows(fields["drafted_D"])
        if step.proposal is None:
            drafts_D = fields["planned_D"]
        else:
            tables.append_blocks(fields)  # the step itself does it later
            drafts_D = step.proposal.guess(fields, places, is_certain)
        places.write(drafts_D)
        return drafts_D

    def learn(self, fields: Mapping[str, Tensor], counts_C: Tensor) -> None:
        """On the device, behind a step: its rows got these tokens of those that the host gave."""
        rows_C = fields["sampling_rows_C"]
        self.excess.index_add_(0, rows_C, fields["slot_counts_C"] - counts_C)
        if self._tells_right:
            self._right[rows_C] = counts_C - 1
