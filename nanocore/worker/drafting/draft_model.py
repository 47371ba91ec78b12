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
from nanocore.protocol.errors import ConfigError, ModelFileError
from nanocore.protocol.messages import MAX_FILE_BYTES
from nanocore.worker.communication.communicator import Communicator, StageLinks
from nanocore.worker.config.json_settings import read_json
from nanocore.worker.config.model_config import ModelConfig
from nanocore.worker.devices import dtype_name
from nanocore.worker.layers.decoder import DecoderModel, fill_and_pack
from nanocore.worker.loading.checked_model import check_files, read_model, read_weight_format
from nanocore.worker.loading.dummy_weights import fill_dummy_weights
from nanocore.worker.loading.loader import load_weights
from nanocore.worker.loading.model_folder import resolve_model
from nanocore.worker.loading.weights import Entries
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
        except ModelFileError as error:
            raise ModelFileError(f'{_FLAG}, "model": {error}') from None
        own = replace(
            config,
            folder=folder,
            dtype=dtype_name(dtype),
            hf_overrides={},
            merge_lora=None,
            tensor_parallel_size=1,
        )
        model, _ = read_model(own, device, log)
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
        """The model without memory. Raises ModelFileError: its weight files are of another."""
        outline = build_model(self.model, self.placement.on_meta())
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
    """Compare what tokens are called where both folders say it."""
    paths = [folder / "tokenizer.json" for folder in folders]
    if not all(path.is_file() for path in paths) or len({path.read_bytes() for path in paths}) == 1:
        return
    (one, other) = (_tokens(path) for path in paths)
    for token_id in sorted(one.keys() | other.keys()):
        if one.get(token_id) != other.get(token_id):
            raise ConfigError(
                f"{_FLAG}: {paths[0]} has {len(one)} tokens and {paths[1]} has {len(other)}, and "
                f"token {token_id} is {one.get(token_id)!r} in the first and "
                f"{other.get(token_id)!r} in the second: a draft model of the same vocabulary is "
                "served"
            )


class _Vocabulary(msgspec.Struct):
    vocab: dict[str, int] | list[tuple[str, float]] = {}


class _AddedToken(msgspec.Struct):
    id: int
    content: str


class _TokenizerFile(msgspec.Struct):
    """Whatever tokenizer.json says of token ids."""

    model: _Vocabulary
    added_tokens: list[_AddedToken] = []


def _tokens(path: Path) -> dict[int, str]:
    tokenizer = read_json(path, _TokenizerFile, MAX_FILE_BYTES)
    vocabulary = tokenizer.model.vocab
    if isinstance(vocabulary, dict):
        tokens = {token_id: token for token, token_id in vocabulary.items()}
    else:
        tokens = {i: token for i, (token, _) in enumerate(vocabulary)}
    return tokens | {added.id: added.content for added in tokenizer.added_tokens}


class _Passes(msgspec.Struct, frozen=True):
    """Passes of the draft model, on the host.

    bounds: of each. sampled: how the N rows of each sample, the same where N is.
    """

    bounds: list[HostBounds]
    sampled: list[SampledRows]


class DraftModel:
    """Implements `WorkerProposer`. Every rank has a whole one, and the first one's drafts count.

    Args:
        model: a whole one. kernels, tp: those of the served model.
    """

    def __init__(self, model: DecoderModel, kernels: Kernels, tp: Communicator) -> None:
        self.model = model
        self.kv_specs = [replace(spec, window=0) for spec in model.kv_specs]
        self._stage = ModelStage(model, kernels, StageLinks())
        self._tp = tp
        self._compute = self._stage.compute

    def allocate(
        self, kv_caches: list[KVCache], batch: InputBatch, tables: RowTables, excess: Tensor
    ) -> None:
        self._stage.kv_caches = kv_caches
        self._stage.rotary = self.model.rotary_tables(tables.max_model_len)
        self._batch, self._tables, self._excess = batch, tables.of_full_group(), excess
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
        ends_C = starts_C + counts_C
        self._num_held[rows_C] = ends_C + np.where(ends_C == known_C, drafts_C - 1, 0)
        # Kernels want sequences of few tokens first.
        by_count = (counts_C > _MOST_BEHIND).argsort(kind="stable")
        counts_B = counts_C[by_count]
        query_start = np.concatenate(([0], counts_B.cumsum()))
        source_T = by_count.repeat(counts_B)
        last_C = np.empty_like(counts_C)
        last_C[by_count] = query_start[1:] - 1
        sizes = [int(np.count_nonzero(drafts_C > i)) for i in range(int(drafts_C[0]))]
        sampled = {n: self._batch.sampling.of_rows(rows_C[:n]) for n in sizes}
        num_few = int(np.count_nonzero(counts_C <= _MOST_BEHIND))
        columns = {
            "draft_rows_C": rows_C,
            "draft_starts_C": starts_C,
            "draft_known_C": known_C,
            "draft_last_C": last_C,
            "draft_order_B": by_count,
            "draft_source_T": source_T,
            "draft_offset_T": np.arange(len(source_T)) - query_start[:-1].repeat(counts_B),
            "draft_query_start_A": query_start.astype(np.int32),
            "draft_numbers_A": np.arange(len(rows_C) + 1, dtype=np.int32),
            "draft_num_decodes": np.array([num_few, *sizes[1:]], np.int32),
        }
        for n, rows in sampled.items():
            columns |= {f"draft_{n}_{name}": column for name, column in rows.columns.items()}
        seq_lens = [ends_C[by_count], *(known_C[:n] + i for i, n in enumerate(sizes[1:], 1))]
        bounds = [HostBounds(num_few, query_start.tolist(), seq_lens[0].tolist(), _MOST_BEHIND)]
        bounds += [
            HostBounds(len(lens), [*range(len(lens) + 1)], lens.tolist(), 1)
            for lens in seq_lens[1:]
        ]
        passes = _Passes(bounds, [sampled[n] for n in sizes])
        return Proposal(columns, lambda *given: self._guess(passes, *given))

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
        self, passes: _Passes, fields: Mapping[str, Tensor], places: TokenPlaces, is_certain: bool
    ) -> Tensor:
        """Write drafts to the rows, one pass after the other."""
        rows_C, starts_C = fields["draft_rows_C"], fields["draft_starts_C"]
        known_C, order_B, source_T = (
            fields[f"draft_{name}"] for name in ("known_C", "order_B", "source_T")
        )
        if not is_certain:
            excess_C = self._excess[rows_C]
            known_C = known_C - excess_C
            starts_C = starts_C - torch.minimum(excess_C, starts_C)
        query_start_A = fields["draft_query_start_A"]
        step = {
            "rows_T": rows_C[source_T],
            "positions_T": starts_C[source_T] + fields["draft_offset_T"],
            "rows_B": rows_C[order_B],
            "seq_lens_B": (starts_C[order_B] + query_start_A.diff()).int(),
            "query_start_A": query_start_A,
            "sample_index_R": fields["draft_last_C"],
        }
        numbers_A = fields["draft_numbers_A"]
        for i, (bounds, sampled) in enumerate(zip(passes.bounds, passes.sampled, strict=True)):
            num_rows = len(bounds.seq_lens)
            rows_N, next_N = rows_C[:num_rows], known_C[:num_rows] + i
            if i:
                step = {
                    "rows_T": rows_N,
                    "positions_T": next_N - 1,
                    "rows_B": rows_N,
                    "seq_lens_B": next_N.int(),
                    "query_start_A": numbers_A[: num_rows + 1],
                    "sample_index_R": numbers_A[:num_rows].long(),
                }
            step["num_decodes_1"] = fields["draft_num_decodes"][i : i + 1]
            logits_NV = self._logits(step, bounds)
            own = {name: fields[f"draft_{num_rows}_{name}"] for name in sampled.columns}
            where = TokenPlaces(self._tables.token_table, rows_N, next_N)
            assert self._stage.sampler is not None, "it is a whole model"
            self._stage.sampler.sample(logits_NV, SamplingMetadata(sampled, own, where))
        return self._tp.all_gather(places.read().int())[0]

    def _logits(self, step: dict[str, Tensor], bounds: HostBounds) -> Tensor:
        nothing = step["rows_T"][:0]
        step |= {
            "slots_GT": torch.zeros_like(step["positions_T"]),
            "block_rows_W": nothing,
            "block_columns_W": nothing,
            "block_ids_W": nothing.int(),
        }
        self._tables.find_slots(step)
        return self._compute(self._tables.inputs(step, bounds))
