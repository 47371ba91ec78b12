"""The served model's own MTP head as the proposer of its drafts: see `MultiTokenPredictor`.

What it needs of the tokens before it has of every step, so it drafts whenever a plan asks for it.
A first draft is guessed of the model's hidden state, and further ones of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Final

import msgspec
import torch
from torch import Tensor

from nanocore.kernels.interface import Kernels
from nanocore.kernels.sampling import TokenPlaces
from nanocore.kernels.states import LayerCache
from nanocore.protocol.errors import ConfigError
from nanocore.worker.communication.communicator import Communicator
from nanocore.worker.config.model_config import ModelConfig
from nanocore.worker.devices import select_device
from nanocore.worker.drafting.passes import DraftingRows, Pass, PassProposer
from nanocore.worker.layers.decoder import DecoderModel, fill_and_pack
from nanocore.worker.layers.mtp import MultiTokenPredictor
from nanocore.worker.loading.checkpoint import all_tensors
from nanocore.worker.loading.dummy_weights import fill_dummy_weights
from nanocore.worker.loading.gguf.gguf_files import is_gguf
from nanocore.worker.loading.loader import check_weights, load_weights
from nanocore.worker.loading.weights import MTP_PREFIX, Entries
from nanocore.worker.rank_messages import WorkerConfig
from nanocore.worker.step.batch_step import BatchStep
from nanocore.worker.step.drafts import Proposal
from nanocore.worker.step.input_batch import InputBatch
from nanocore.worker.step.step_memory import RowTables

_ASKED: Final = '--speculative-config: "method" "mtp"'
_INSTEAD: Final = 'take "suffix" or "ngram", which serve every model, or a draft "model"'


class MtpFiles(msgspec.Struct, frozen=True):
    """The MTP head as the served model's files have it."""

    config: WorkerConfig

    @classmethod
    def find(cls, config: WorkerConfig, model: ModelConfig) -> MtpFiles | None:
        """None: it is not asked for. Raises ConfigError: the model has none, or several."""
        speculative = config.speculative
        if speculative is None or speculative.method != "mtp":
            return None
        folder, number = Path(config.folder), model.num_mtp_layers
        if config.load_format == "dummy":
            has_head, why = number > 0, "its config.json has no mtp_num_hidden_layers"
        else:
            has_head = any(one.name.startswith(MTP_PREFIX) for one in all_tensors(folder))
            why = f"its files have no tensors {MTP_PREFIX}*"
        if is_gguf(folder):
            why = "layers nextn of GGUF files are not read; take the safetensors files"
        if not has_head:
            raise ConfigError(
                f"{_ASKED} needs a checkpoint with an MTP head, and {config.folder} has none that "
                f"is served: {why}; or {_INSTEAD}"
            )
        if number > 1:
            raise ConfigError(
                f"{_ASKED}: {config.folder} has {number} MTP layers (mtp_num_hidden_layers), and "
                f"one is served: {_INSTEAD}"
            )
        return cls(config)

    def outline(self, target: DecoderModel) -> MultiTokenPredictor:
        """The head of a model without memory. Raises ModelFileError: its files are of another."""
        outline = MultiTokenPredictor(target, self._rounds_head(target))
        if self.config.load_format != "dummy":
            check_weights(Path(self.config.folder), outline.entries(), outline.entry_name)
        return outline

    def proposer(self, target: DecoderModel, kernels: Kernels, tp: Communicator) -> MtpProposer:
        """The head in memory, its weights to be filled."""
        return MtpProposer(target, kernels, self._rounds_head(target))

    def _rounds_head(self, target: DecoderModel) -> bool:
        """Whether the head is of 16 bits, where reading it takes most of a pass: on a CPU."""
        placement, config = target.placement, self.config
        is_short = placement.dtype.itemsize == 2 and placement.weight_format is None
        is_cpu = select_device(config.device).type == "cpu"
        return is_short and config.quantization is None and is_cpu

    def fill(self, model: DecoderModel, kernels: Kernels, progress: bool) -> int:
        """Read the head's weights; returns the memory that they take."""
        return fill_draft(self.config, model, kernels, progress)


def fill_draft(config: WorkerConfig, model: DecoderModel, kernels: Kernels, progress: bool) -> int:
    """Read the weights of what drafts; returns the memory that they take. config: of its files.

    Raises ModelFileError: see `loader.load_weights`.
    """

    def fill(entries: Entries) -> None:
        if config.load_format == "dummy":
            fill_dummy_weights(entries, config.seed)
        else:
            load_weights(Path(config.folder), entries, model.entry_name, progress)

    return fill_and_pack(model, kernels, fill, config.quantization)


class MtpProposer(PassProposer):
    """Implements `WorkerProposer`. Each rank has its part of the head, and samples with the others.

    Args:
        target: the served model, which computes what the head needs from now on. rounds_head: see
            `MultiTokenPredictor`.
    """

    model: MultiTokenPredictor

    def __init__(self, target: DecoderModel, kernels: Kernels, rounds_head: bool = False) -> None:
        super().__init__(MultiTokenPredictor(target, rounds_head), kernels)
        target.predictor = self.model

    def allocate(
        self, kv_caches: list[LayerCache], batch: InputBatch, tables: RowTables, excess: Tensor
    ) -> None:
        super().allocate(kv_caches, batch, tables, excess)
        num_rows = len(excess)
        self.model.allocate(kv_caches[0], num_rows, batch.max_drafts)
        self._num_right = torch.zeros(num_rows, dtype=torch.int64, device=excess.device)

    def begin_row(self, row: int) -> None:
        self.model.kept_RKE[row, 0] = 0  # its first token has none before it

    def propose(self, step: BatchStep) -> Proposal:
        passes, columns = self._plan(DraftingRows.of(step))
        return Proposal(columns, partial(self._guess, passes))

    def _guess(
        self,
        passes: list[Pass],
        fields: Mapping[str, Tensor],
        places: TokenPlaces,
        is_certain: bool,
    ) -> Tensor:
        rows_C, known_C = fields["draft_rows_C"], fields["draft_known_C"]
        if not is_certain:
            known_C = known_C - self._excess[rows_C]
        self._num_right[fields["rows_B"]] = fields["num_right_B"].long()
        before_CE = self.model.kept_RKE[rows_C, self._num_right[rows_C]]
        self.model.before_RKE[rows_C, 0] = before_CE
        return self._guess_all(passes, rows_C, known_C, fields, places)
