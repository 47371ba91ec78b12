"""A smaller model that guesses what the served one will sample.

It samples each draft with the row's own noise, filters and edits, as the served model does at that
position. So a draft is right as often as both models' choices are the same.

Its K and V lie in the served model's blocks of the full group, as further layers: block tables,
prefix hits and the size of the cache follow from that. They are computed when a row drafts and not
before, so an engine of many streams, which drafts nothing, pays nothing for them. A row that drafts
computes first what its blocks lack: one or two tokens if it drafted in the step before, and else in
chunks of a step's budget, over several steps. Until it is there its drafts are poor.

Shape suffixes: see `nanocore.kernels.interface`; further, C rows that draft, the one with the most
drafts first, and N of them that a pass is for.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Final

import msgspec
import numpy as np
import torch
from msgspec.structs import replace
from numpy.typing import NDArray
from torch import Tensor

from nanocore.kernels.attention import KVCache
from nanocore.kernels.interface import Kernels
from nanocore.kernels.sampling import TokenPlaces
from nanocore.kernels.states import LayerCache
from nanocore.protocol.errors import ConfigError, ModelFileError
from nanocore.worker.communication.communicator import Communicator, StageLinks
from nanocore.worker.config.model_config import ModelConfig
from nanocore.worker.devices import dtype_name
from nanocore.worker.layers.decoder import DecoderModel, fill_and_pack
from nanocore.worker.loading.checked_model import (
    check_draft_model,
    check_files,
    read_model,
    read_weight_format,
)
from nanocore.worker.loading.dummy_weights import fill_dummy_weights
from nanocore.worker.loading.loader import load_weights
from nanocore.worker.loading.model_folder import resolve_model
from nanocore.worker.loading.weights import Entries
from nanocore.worker.memory.kv_memory import in_full_group
from nanocore.worker.models import build_model
from nanocore.worker.placement import Placement
from nanocore.worker.plan import SchedulerOutput
from nanocore.worker.rank_messages import WorkerConfig
from nanocore.worker.sampling.columns import SampledRows, SamplingMetadata
from nanocore.worker.step.batch_step import BatchStep
from nanocore.worker.step.drafts import Proposal
from nanocore.worker.step.input_batch import InputBatch
from nanocore.worker.step.model_stage import ModelStage
from nanocore.worker.step.step_graphs import graph_shapes, padded_steps
from nanocore.worker.step.step_memory import HostBounds, RowTables
from nanocore.worker.step.stream import Stream

_MOST_BEHIND: Final = 2
"""Tokens that a row computes first if it drafted in the step before: the last draft, if it was
right, and the token behind it."""
_FLAG: Final = "--speculative-config"


class DraftFiles(msgspec.Struct, frozen=True):
    """A draft model as its files have it. config: of a worker that would serve it, on one rank."""

    config: WorkerConfig
    model: ModelConfig
    placement: Placement

    @classmethod
    def find(
        cls,
        config: WorkerConfig,
        served: ModelConfig,
        dtype: torch.dtype,
        device: torch.device,
        log: bool = True,
    ) -> DraftFiles | None:
        """The draft model that a configuration names; None: none. dtype: of the served model.

        log: say what is odd about its files, and compare tokenizers; for one rank of several.

        Raises:
            ConfigError: it has another vocabulary, or fewer positions, than the served model.
            ModelFileError: a file is missing, malformed, or asks for what is not implemented.
        """
        speculative = config.speculative
        if speculative is None or speculative.model is None:
            return None
        try:
            folder = str(resolve_model(speculative.model))
            own = replace(
                config,
                folder=folder,
                dtype=dtype_name(dtype),
                hf_overrides={},
                merge_lora=None,
                tensor_parallel_size=1,
            )
            model, _ = read_model(own, device, log)
        except ModelFileError as error:
            reason = str(error).removeprefix("--model ")
            raise ModelFileError(f'{_FLAG}, "model": {reason}') from None
        if model.vocab_size != served.vocab_size:
            raise ConfigError(
                f"{_FLAG}: the draft model {folder} has {model.vocab_size} tokens, and the model "
                f"{served.vocab_size}: a draft model of the same vocabulary is served"
            )
        if model.longest_model_len < config.max_model_len:
            raise ConfigError(
                f"{_FLAG}: the draft model {folder} has {model.longest_model_len} positions, and "
                f"requests {config.max_model_len}: lower --max-model-len to the draft model's"
            )
        if log:
            _check_tokens(Path(config.folder), Path(folder))
        weight_format = read_weight_format(own, model, dtype, log)
        return cls(own, model, Placement(dtype, device, weight_format=weight_format))

    def outline(self) -> DecoderModel:
        """The model without memory.

        Raises:
            ConfigError: see `check_draft_model`.
            ModelFileError: its weight files are of another.
        """
        outline = build_model(self.model, self.placement.on_meta())
        check_draft_model(self.config, outline)
        check_files(self.config, outline)
        return outline

    def proposer(self, kernels: Kernels, tp: Communicator) -> DraftModel:
        """The model in memory, its weights to be filled; kernels, tp: of the served model."""
        return DraftModel(build_model(self.model, self.placement), kernels, tp)

    def fill(self, model: DecoderModel, kernels: Kernels, progress: bool) -> int:
        """Read the model's weights; returns the memory that they take.

        Raises ModelFileError: see `loader.load_weights`.
        """

        def fill(entries: Entries) -> None:
            if self.config.load_format == "dummy":
                fill_dummy_weights(entries, self.config.seed)
            else:
                load_weights(Path(self.config.folder), entries, model.entry_name, progress)

        return fill_and_pack(model, kernels, fill, self.config.quantization)


def _check_tokens(*folders: Path) -> None:
    """Compare what tokens are called, where both folders say it."""
    paths = [folder / "tokenizer.json" for folder in folders]
    if not all(path.is_file() for path in paths) or len({path.read_bytes() for path in paths}) == 1:
        return
    from tokenizers import Tokenizer  # what follows takes seconds, and few need it

    vocabularies = []
    for path in paths:
        try:
            vocabularies.append(Tokenizer.from_file(str(path)).get_vocab())
        except Exception as error:  # it raises nothing more special
            raise ModelFileError(f"{path}: {error}; download it again") from None
    one, other = vocabularies
    if one != other:
        token = min(one.items() ^ other.items(), key=lambda item: item[::-1])
        raise ConfigError(
            f"{_FLAG}: {paths[0]} has {len(one)} tokens and {paths[1]} has {len(other)}, and only "
            f"one of them has token {token[1]} as {token[0]!r}: a draft model of the same "
            "vocabulary is served"
        )


class DraftModel:
    """Implements `WorkerProposer`. Every rank has a whole one, and the first one's drafts count.

    Args:
        model: a whole one. kernels, tp: those of the served model.
    """

    def __init__(self, model: DecoderModel, kernels: Kernels, tp: Communicator) -> None:
        self.model = model
        self.cache_specs = in_full_group(model.cache_specs)
        self._stage = ModelStage(model, kernels, StageLinks())
        self._tp = tp
        self._compute = self._stage.compute

    def allocate(
        self, kv_caches: list[LayerCache], batch: InputBatch, tables: RowTables, excess: Tensor
    ) -> None:
        self._stage.kv_caches = kv_caches
        self._stage.rotary = self.model.rotary_tables(tables.max_model_len)
        self._batch, self._tables, self._excess = batch, tables.of_full_group(), excess
        assert isinstance(kv_caches[0], KVCache)
        self._is_filled = np.zeros(len(kv_caches[0].k_NSKD), bool)
        """Whether this model's K and V of all tokens of a block are there."""
        self._num_held = np.zeros(batch.max_num_seqs, np.int64)
        """Tokens of a row, from its first one on, whose K and V are there, at least."""

    def release_kv_memory(self) -> None:
        self._stage.kv_caches = []

    def capture(self, max_num_batched_tokens: int, stream: Stream, enforce_eager: bool) -> None:
        self._max_tokens, num_rows = max_num_batched_tokens, self._batch.max_num_seqs
        if stream.is_host:
            if not enforce_eager:
                replay = self._stage.capture(max_num_batched_tokens, num_rows)
                self._compute = replay or self._stage.compute
            return
        sizes = num_rows, max_num_batched_tokens, self._batch.block_size, _MOST_BEHIND - 1
        shapes = graph_shapes(self._stage.kernels.graph_support, *sizes)
        for _, _, inputs in padded_steps(shapes, self._tables, self.model.placement.device):
            self._compute(inputs)

    def apply(self, plan: SchedulerOutput) -> None:
        blocks = self._batch.blocks
        for new in plan.added:
            num_cached = new.num_computed_tokens // self._batch.block_size
            self._is_filled[blocks.ids[0, new.row, num_cached : blocks.num_blocks[new.row]]] = False
            self._num_held[new.row] = 0
        if plan.block_rows:  # the ids of the full group come first
            ids = np.frombuffer(plan.block_ids, "<i4", len(plan.block_rows) // 4)
            self._is_filled[ids] = False

    def settle(self, rows: NDArray[np.int64], num_wrong: NDArray[np.int64]) -> None:
        self._num_held[rows] = (self._num_held[rows] - num_wrong).clip(min=0)

    def propose(self, step: BatchStep) -> Proposal:
        num_drafts = step.slot_counts - 1
        order = (-num_drafts).argsort(kind="stable")[: np.count_nonzero(num_drafts)]
        rows_C, drafts_C = step.sampling_rows[order], num_drafts[order]
        first_slots = np.cumsum(step.slot_counts) - step.slot_counts
        known_C = step.sample_positions[first_slots[order]]
        starts_C, counts_C = self._take(rows_C, known_C)
        ends_C, source_T = starts_C + counts_C, np.arange(len(rows_C)).repeat(counts_C)
        self._num_held[rows_C] = ends_C + np.where(ends_C == known_C, drafts_C - 1, 0)
        query_start = np.concatenate(([0], counts_C.cumsum()))
        columns = {
            "draft_rows_C": rows_C,
            "draft_known_C": known_C,
            "draft_starts_C": starts_C,
            "draft_rows_T": rows_C[source_T],
            "draft_positions_T": np.arange(len(source_T)) + (starts_C - query_start[:-1])[source_T],
            "draft_source_T": source_T,
            "draft_query_start_A": query_start.astype(np.int32),
        }
        num_few = int((counts_C <= _MOST_BEHIND).cumprod().sum())
        bounds = HostBounds(num_few, query_start.tolist(), ends_C.tolist(), _MOST_BEHIND)
        passes: list[tuple[HostBounds, SampledRows]] = []
        sampled: dict[int, SampledRows] = {}
        for i in range(int(drafts_C[0])):
            n = int(np.count_nonzero(drafts_C > i))
            if i:
                bounds = HostBounds(n, [*range(n + 1)], (known_C[:n] + i).tolist(), 1)
            if n not in sampled:
                own = sampled[n] = self._batch.sampling.of_rows(rows_C[:n])
                columns |= {f"draft_{n}_{name}": column for name, column in own.columns.items()}
            passes.append((bounds, sampled[n]))
        return Proposal(columns, partial(self._guess, passes))

    def _take(
        self, rows_C: NDArray[np.int64], known_C: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """First token of each row that is to be computed, and how many, of its known tokens."""
        size, ids = self._batch.block_size, self._batch.blocks.ids[0]
        starts_C = self._num_held[rows_C]
        counts_C = known_C - starts_C
        full_C = starts_C // size
        has_full = full_C > 0
        self._is_filled[ids[rows_C[has_full], full_C[has_full] - 1]] = True
        behind = (counts_C > _MOST_BEHIND).nonzero()[0]
        left = self._max_tokens - int(counts_C.clip(max=_MOST_BEHIND).sum())
        for i in behind.tolist():
            row, start, known = int(rows_C[i]), int(starts_C[i]), int(known_C[i])
            # Blocks that it shares with rows before it, of this very step too: all K and V of a
            # layer are written before they are read.
            filled = self._is_filled[ids[row, start // size : (known - 1) // size]]
            num_filled = len(filled) if filled.all() else int(filled.argmin())
            if num_filled:
                start = (start // size + num_filled) * size
            count = min(known - start, _MOST_BEHIND + left)
            left -= max(0, count - _MOST_BEHIND)
            self._is_filled[ids[row, start // size : (start + count) // size]] = True
            starts_C[i], counts_C[i] = start, count
        return starts_C, counts_C

    # From here on where the model runs, and perhaps later than the host goes on.

    def _guess(
        self,
        passes: list[tuple[HostBounds, SampledRows]],
        fields: Mapping[str, Tensor],
        places: TokenPlaces,
        is_certain: bool,
    ) -> Tensor:
        """Write drafts to the rows, one pass after the other. passes: bounds, and of its N rows."""
        rows_C, known_C, starts_C, rows_T, positions_T, query_start_A = (
            fields[f"draft_{name}"]
            for name in ("rows_C", "known_C", "starts_C", "rows_T", "positions_T", "query_start_A")
        )
        if not is_certain:
            excess_C = self._excess[rows_C]
            shift_C = torch.minimum(excess_C, starts_C)
            known_C, starts_C = known_C - excess_C, starts_C - shift_C
            positions_T = positions_T - shift_C[fields["draft_source_T"]]
        seq_lens_B = starts_C + query_start_A.diff()
        for i, (bounds, sampled) in enumerate(passes):
            num_rows = len(bounds.seq_lens)
            rows_N, next_N = rows_C[:num_rows], known_C[:num_rows] + i
            if i:
                rows_T, positions_T, seq_lens_B = rows_N, next_N - 1, next_N
                query_start_A = torch.arange(num_rows + 1, dtype=torch.int32, device=rows_C.device)
            nothing = rows_C[:0]
            step = {
                "rows_T": rows_T,
                "positions_T": positions_T,
                "slots_GT": torch.zeros_like(positions_T),
                "rows_B": rows_N,
                "seq_lens_B": seq_lens_B.int(),
                "num_right_B": nothing.int(),
                "num_drafts_B": nothing.int(),
                "query_start_A": query_start_A,
                "num_decodes_1": rows_C.new_full((1,), bounds.num_decodes, dtype=torch.int32),
                "sample_index_R": query_start_A[1:].long() - 1,
                "block_rows_W": nothing,
                "block_columns_W": nothing,
                "block_ids_W": nothing.int(),
            }
            self._tables.find_slots(step)
            logits_NV = self._compute(self._tables.inputs(step, bounds))
            own = {name: fields[f"draft_{num_rows}_{name}"] for name in sampled.columns}
            where = TokenPlaces(places.token_table, rows_N, next_N)
            assert self._stage.sampler is not None, "it is a whole model"
            self._stage.sampler.sample(logits_NV, SamplingMetadata(sampled, own, where))
        return self._tp.all_gather(places.read().int())[0]
