"""What proposers share that guess in passes: in each one a further draft of each row that drafts.

Each draft is sampled with the row's own noise, filters and edits, as the served model samples at
that position. So a draft is right as often as both choose the same. Shape suffixes: see
`nanocore.kernels.interface`; further, C rows that draft, the one with the most drafts first, and N
of them that a pass is for.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nanocore.kernels.interface import Kernels
from nanocore.kernels.sampling import TokenPlaces
from nanocore.kernels.states import LayerCache
from nanocore.worker.communication.communicator import StageLinks
from nanocore.worker.layers.decoder import DecoderModel
from nanocore.worker.memory.kv_memory import in_full_group
from nanocore.worker.plan import SchedulerOutput
from nanocore.worker.sampling.columns import SampledRows, SamplingMetadata
from nanocore.worker.step.batch_step import BatchStep
from nanocore.worker.step.input_batch import InputBatch
from nanocore.worker.step.model_stage import ModelStage
from nanocore.worker.step.step_graphs import graph_shapes, padded_steps
from nanocore.worker.step.step_memory import HostBounds, RowTables
from nanocore.worker.step.stream import Stream


class DraftingRows(msgspec.Struct, frozen=True):
    """The C rows of a step that draft, how many drafts each, and how many tokens it has before."""

    rows_C: NDArray[np.int64]
    drafts_C: NDArray[np.int64]
    known_C: NDArray[np.int64]

    @classmethod
    def of(cls, step: BatchStep) -> DraftingRows:
        num_drafts = step.slot_counts - 1
        order = (-num_drafts).argsort(kind="stable")[: np.count_nonzero(num_drafts)]
        first_slots = np.cumsum(step.slot_counts) - step.slot_counts
        known_C = step.sample_positions[first_slots[order]]
        return cls(step.sampling_rows[order], num_drafts[order], known_C)


class Pass(msgspec.Struct, frozen=True):
    """A pass on the host: bounds of its step, and how its N rows sample."""

    bounds: HostBounds
    sampled: SampledRows


class PassTokens(msgspec.Struct, frozen=True):
    """Tokens of a pass where the model runs: T of N rows, whose last one is sampled behind."""

    rows_T: Tensor
    positions_T: Tensor
    rows_N: Tensor
    seq_lens_N: Tensor
    query_start_A: Tensor

    @classmethod
    def last(cls, rows_N: Tensor, num_tokens_N: Tensor) -> PassTokens:
        """The last token of each row."""
        size = len(rows_N) + 1
        starts = torch.arange(size, dtype=torch.int32, device=rows_N.device)
        return cls(rows_N, num_tokens_N - 1, rows_N, num_tokens_N, starts)


class PassProposer:
    """Implements part of `WorkerProposer`: passes of a model, and its memory.

    Args:
        model: what guesses. kernels: those of the served model.

    most_tokens: of a row in its first pass, where rows draft in each step.
    """

    most_tokens: ClassVar[int] = 1

    def __init__(self, model: DecoderModel, kernels: Kernels) -> None:
        self.model = model
        self.cache_specs = in_full_group(model.cache_specs)
        self._stage = ModelStage(model, kernels, StageLinks())
        self._compute = self._stage.compute

    def allocate(
        self, kv_caches: list[LayerCache], batch: InputBatch, tables: RowTables, excess: Tensor
    ) -> None:
        self._stage.kv_caches = kv_caches
        self._stage.rotary = self.model.rotary_tables(tables.max_model_len)
        self._compute = self._stage.compute
        self._batch, self._tables, self._excess = batch, tables.of_full_group(), excess

    def release_kv_memory(self) -> None:
        self._stage.kv_caches = []

    def capture(self, max_num_batched_tokens: int, stream: Stream, enforce_eager: bool) -> None:
        num_rows = self._batch.max_num_seqs
        if stream.is_host:
            if not enforce_eager:
                replay = self._stage.capture(max_num_batched_tokens, num_rows)
                self._compute = replay or self._stage.compute
            return
        sizes = num_rows, max_num_batched_tokens, self._batch.block_size, self.most_tokens - 1
        shapes = graph_shapes(self._stage.kernels.graph_support, *sizes)
        for _, _, inputs in padded_steps(shapes, self._tables, self.model.placement.device):
            self._compute(inputs)

    def apply(self, plan: SchedulerOutput) -> None:
        """Rows and blocks of plans need nothing here."""

    def begin_row(self, row: int) -> None:
        """Nor do rows that begin."""

    def settle(self, rows: NDArray[np.int64], num_wrong: NDArray[np.int64]) -> None:
        """Nor does what was wrong."""

    def _plan(
        self, drafting: DraftingRows, first: HostBounds | None = None
    ) -> tuple[list[Pass], dict[str, NDArray]]:
        """(the passes, columns that they need). first: bounds of the first one, if it has more
        tokens than the last one of each row.
        """
        rows_C, drafts_C, known_C = drafting.rows_C, drafting.drafts_C, drafting.known_C
        columns: dict[str, NDArray] = {"draft_rows_C": rows_C, "draft_known_C": known_C}
        passes: list[Pass] = []
        sampled: dict[int, SampledRows] = {}
        for i in range(int(drafts_C[0])):
            n = int(np.count_nonzero(drafts_C > i))
            bounds = None if i else first
            if bounds is None:
                bounds = HostBounds(n, [*range(n + 1)], (known_C[:n] + i).tolist(), 1)
            if n not in sampled:
                own = sampled[n] = self._batch.sampling.of_rows(rows_C[:n])
                columns |= {f"draft_{n}_{name}": column for name, column in own.columns.items()}
            passes.append(Pass(bounds, sampled[n]))
        return passes, columns

    # From here on where the model runs, and perhaps later than the host goes on.

    def _guess_all(
        self,
        passes: list[Pass],
        rows_C: Tensor,
        known_C: Tensor,
        fields: Mapping[str, Tensor],
        places: TokenPlaces,
        first: PassTokens | None = None,
    ) -> Tensor:
        """Run the passes one after the other; returns the drafts, int32 [D].

        first: tokens of the first one, if these are more than the last one of each row.
        """
        for i, one in enumerate(passes):
            rows_N = rows_C[: len(one.bounds.seq_lens)]
            next_N = known_C[: len(rows_N)] + i
            tokens = PassTokens.last(rows_N, next_N) if i or first is None else first
            self._run(one, tokens, next_N, fields, places.token_table)
        return places.read().int()

    def _run(
        self,
        one: Pass,
        tokens: PassTokens,
        next_N: Tensor,
        fields: Mapping[str, Tensor],
        token_table: Tensor,
    ) -> None:
        """Run a pass, and write what it samples to its rows. next_N: the drafts' positions."""
        rows_N, nothing = tokens.rows_N, tokens.rows_N[:0]
        none_N = torch.zeros_like(rows_N, dtype=torch.int32)
        step = {
            "rows_T": tokens.rows_T,
            "positions_T": tokens.positions_T,
            "slots_GT": torch.zeros_like(tokens.positions_T),
            "rows_B": rows_N,
            "seq_lens_B": tokens.seq_lens_N.int(),
            "num_right_B": none_N,
            "num_drafts_B": none_N,
            "query_start_A": tokens.query_start_A,
            "num_decodes_1": rows_N.new_full((1,), one.bounds.num_decodes, dtype=torch.int32),
            "sample_index_R": tokens.query_start_A[1:].long() - 1,
            "block_rows_W": nothing,
            "block_columns_W": nothing,
            "block_ids_W": nothing.int(),
        }
        self._tables.find_slots(step)
        logits_NV = self._compute(self._tables.inputs(step, one.bounds))
        own = {name: fields[f"draft_{len(rows_N)}_{name}"] for name in one.sampled.columns}
        where = TokenPlaces(token_table, rows_N, next_N)
        assert self._stage.sampler is not None, "it has a head"
        self._stage.sampler.sample(logits_NV, SamplingMetadata(one.sampled, own, where))
