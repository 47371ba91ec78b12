"""A smaller model that guesses what the served one will sample.

Its K and V lie in the served model's blocks of the full group, as further layers: block tables,
prefix hits and the size of the cache follow from that. They are computed when a row drafts and not
before, so an engine of many streams, which drafts nothing, pays nothing for them. A row that drafts
computes first what its blocks lack: one or two tokens if it drafted in the step before, and else in
chunks of a step's budget, over several steps. Until it is there its drafts are poor.

How it samples, and shape suffixes: see `passes`.
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
from nanocore.worker.communication.communicator import Communicator
from nanocore.worker.config.model_config import ModelConfig
from nanocore.worker.devices import dtype_name
from nanocore.worker.drafting.mtp import MtpFiles, fill_draft
from nanocore.worker.drafting.passes import DraftingRows, Pass, PassProposer, PassTokens
from nanocore.worker.layers.decoder import DecoderModel
from nanocore.worker.loading.checked_model import (
    check_draft_model,
    check_files,
    read_model,
    read_weight_format,
)
from nanocore.worker.loading.model_folder import resolve_model
from nanocore.worker.models import build_model
from nanocore.worker.placement import Placement
from nanocore.worker.plan import SchedulerOutput
from nanocore.worker.rank_messages import WorkerConfig
from nanocore.worker.step.batch_step import BatchStep
from nanocore.worker.step.drafts import Proposal
from nanocore.worker.step.input_batch import InputBatch
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

    def outline(self, _target: DecoderModel) -> DecoderModel:
        """The model without memory.

        Raises:
            ConfigError: see `check_draft_model`.
            ModelFileError: its weight files are of another.
        """
        outline = build_model(self.model, self.placement.on_meta())
        check_draft_model(self.config, outline)
        check_files(self.config, outline)
        return outline

    def proposer(self, _target: DecoderModel, kernels: Kernels, tp: Communicator) -> DraftModel:
        """The model in memory, its weights to be filled; kernels, tp: of the served model."""
        return DraftModel(build_model(self.model, self.placement), kernels, tp)

    def fill(self, model: DecoderModel, kernels: Kernels, progress: bool) -> int:
        """Read the model's weights; returns the memory that they take."""
        return fill_draft(self.config, model, kernels, progress)


def find_draft_files(
    config: WorkerConfig,
    served: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    log: bool = True,
) -> DraftFiles | MtpFiles | None:
    """What a configuration names to draft where the model runs; None: nothing.

    Raises ConfigError, ModelFileError: see `MtpFiles.find` and `DraftFiles.find`.
    """
    found = MtpFiles.find(config, served)
    return found or DraftFiles.find(config, served, dtype, device, log)


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


class DraftModel(PassProposer):
    """Implements `WorkerProposer`. Every rank has a whole one, and the first one's drafts count.

    Args:
        model: a whole one. kernels, tp: those of the served model.
    """

    most_tokens = _MOST_BEHIND

    def __init__(self, model: DecoderModel, kernels: Kernels, tp: Communicator) -> None:
        super().__init__(model, kernels)
        self._tp = tp

    def allocate(
        self, kv_caches: list[LayerCache], batch: InputBatch, tables: RowTables, excess: Tensor
    ) -> None:
        super().allocate(kv_caches, batch, tables, excess)
        assert isinstance(kv_caches[0], KVCache)
        self._is_filled = np.zeros(len(kv_caches[0].k_NSKD), bool)
        """Whether this model's K and V of all tokens of a block are there."""
        self._num_held = np.zeros(batch.max_num_seqs, np.int64)
        """Tokens of a row, from its first one on, whose K and V are there, at least."""

    def capture(self, max_num_batched_tokens: int, stream: Stream, enforce_eager: bool) -> None:
        self._max_tokens = max_num_batched_tokens
        super().capture(max_num_batched_tokens, stream, enforce_eager)

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
        drafting = DraftingRows.of(step)
        rows_C, drafts_C, known_C = drafting.rows_C, drafting.drafts_C, drafting.known_C
        starts_C, counts_C = self._take(rows_C, known_C)
        ends_C, source_T = starts_C + counts_C, np.arange(len(rows_C)).repeat(counts_C)
        self._num_held[rows_C] = ends_C + np.where(ends_C == known_C, drafts_C - 1, 0)
        query_start = np.concatenate(([0], counts_C.cumsum()))
        num_few = int((counts_C <= _MOST_BEHIND).cumprod().sum())
        first = HostBounds(num_few, query_start.tolist(), ends_C.tolist(), _MOST_BEHIND)
        passes, columns = self._plan(drafting, first)
        columns |= {
            "draft_starts_C": starts_C,
            "draft_rows_T": rows_C[source_T],
            "draft_positions_T": np.arange(len(source_T)) + (starts_C - query_start[:-1])[source_T],
            "draft_source_T": source_T,
            "draft_query_start_A": query_start.astype(np.int32),
        }
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
        passes: list[Pass],
        fields: Mapping[str, Tensor],
        places: TokenPlaces,
        is_certain: bool,
    ) -> Tensor:
        """Write drafts to the rows, one pass after the other."""
        rows_C, known_C, starts_C, rows_T, positions_T, query_start_A = (
            fields[f"draft_{name}"]
            for name in ("rows_C", "known_C", "starts_C", "rows_T", "positions_T", "query_start_A")
        )
        if not is_certain:
            excess_C = self._excess[rows_C]
            shift_C = torch.minimum(excess_C, starts_C)
            known_C, starts_C = known_C - excess_C, starts_C - shift_C
            positions_T = positions_T - shift_C[fields["draft_source_T"]]
        seq_lens_C = starts_C + query_start_A.diff()
        first = PassTokens(rows_T, positions_T, rows_C, seq_lens_C, query_start_A)
        drafts_D = self._guess_all(passes, rows_C, known_C, fields, places, first)
        return self._tp.all_gather(drafts_D)[0]
