"""Checks of a rank's model before any memory is taken for it.

config.json may say anything, so a model is first built without memory (on torch's meta device):
files that do not fit it, and memory that does not hold it, are then errors that cost nothing. Where
config.json is silent or contradicts the weights, the weights count, as in transformers: they have
their own dtype, and a head that is stored beside the embedding is used if it is another matrix.
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Final

import torch
from msgspec.structs import replace

from nanocore.protocol.errors import ConfigError, ModelFileError, shorten
from nanocore.worker.config.model_config import ModelConfig
from nanocore.worker.devices import dtype_name, select_device, select_dtype
from nanocore.worker.layers.decoder import DecoderModel
from nanocore.worker.loading.checkpoint import CheckpointTensor, all_tensors
from nanocore.worker.loading.formats.checkpoint_format import folder_format, folder_settings
from nanocore.worker.loading.gguf.gguf_files import is_gguf
from nanocore.worker.loading.gguf.gguf_format import GgufFormat
from nanocore.worker.loading.loader import check_weights
from nanocore.worker.loading.lora import MergedFormat, read_adapter
from nanocore.worker.loading.weights import (
    EMBEDDING,
    FLOATS,
    HEAD,
    MTP_PREFIX,
    TensorNames,
    WeightFormat,
)
from nanocore.worker.memory.kv_cache_bytes import CPU_MEMORY, cpu_memory_bytes, require_weights
from nanocore.worker.models import load_model_config, model_class
from nanocore.worker.rank_messages import WorkerConfig

logger = logging.getLogger(__name__)


def read_model(
    config: WorkerConfig, device: torch.device, log: bool = True
) -> tuple[ModelConfig, torch.dtype]:
    """(the model as its files have it, the dtype of weights and activations).

    log: say what is not as config.json or the checkpoint has it.

    Raises:
        ModelFileError: a file is missing, malformed, or asks for what is not implemented.
        ConfigError: --dtype cannot be had here.
    """
    folder = Path(config.folder)
    named = load_model_config(folder, config.hf_overrides)
    names = model_class(named.architecture).common_name
    model = named if config.load_format == "dummy" else as_stored(named, folder, names)
    dtype = select_dtype(config.dtype, model, device)
    if log and model.tie_word_embeddings != named.tie_word_embeddings:
        logger.warning(
            "%s: tie_word_embeddings is set, but the files have an lm_head that differs from the "
            "embedding: it is used",
            folder / "config.json",
        )
    if log and config.dtype == "auto" and model.dtype == "float16" != dtype_name(dtype):
        logger.info(
            "the checkpoint's float16 is computed in %s here; --dtype float32 keeps every digit",
            dtype_name(dtype),
        )
    return model, dtype


def read_weight_format(
    config: WorkerConfig, model: ModelConfig, dtype: torch.dtype, log: bool = True
) -> WeightFormat | None:
    """Choose the format of linear layers' weights, with the adapter merged that config names.

    log: say how, where they are not floats.

    Raises:
        ModelFileError: see `folder_format` and `read_adapter`.
        ConfigError: dummy weights are asked for, which are floats, and the files' are not.
    """
    first, names = Path(config.folder), model_class(model.architecture).common_name
    stored: WeightFormat | None
    if config.load_format == "dummy":
        said = None if is_gguf(first) else folder_settings(first)
        if said is not None:
            raise ConfigError(
                f"--load-format dummy: dummy weights are floats, and {said.source} has "
                f"{said.name}: take it out, and use --quantization"
            )
        stored = None
    elif is_gguf(first):
        stored = GgufFormat(first, model.attention.head_dim, dtype)
    else:
        speculative = config.speculative
        has_head = speculative is not None and speculative.method == "mtp"
        stored = folder_format(first, partial(_with_mtp, names) if has_head else names, log=log)
    if config.merge_lora is None:
        return stored
    return MergedFormat(stored, read_adapter(Path(config.merge_lora), names), dtype)


def _with_mtp(names: TensorNames, stored: str) -> str | None:
    """Name of a tensor, of an MTP head's, too, which models themselves do not read."""
    return stored if stored.startswith(MTP_PREFIX) else names(stored)


def check_files(config: WorkerConfig, model: DecoderModel) -> None:
    """Check that the weight files are those of this model, by their headers, and the adapter's.

    Raises ModelFileError: they are not; see `loader.load_weights`.
    """
    entries, weight_format = model.entries(), model.placement.weight_format
    if isinstance(weight_format, MergedFormat):
        weight_format.check_used(entries)
    if config.load_format != "dummy":
        check_weights(Path(config.folder), entries, model.entry_name)


def check_drafts(config: WorkerConfig, model: DecoderModel) -> None:
    """Check that a step's drafts of a row do not fill a block of states before they are verified.

    Raises ConfigError: they may.
    """
    has_states = any(spec.kind.has_states for spec in model.cache_specs)
    if has_states and config.max_drafts > config.block_size:
        raise ConfigError(
            f"--speculative-config: num_speculative_tokens is {config.max_drafts}, and with layers "
            f"that keep states at most --block-size, {config.block_size}, are served: lower "
            "num_speculative_tokens or raise --block-size"
        )


def check_draft_model(config: WorkerConfig, model: DecoderModel) -> None:
    """Check that a model can draft.

    Raises ConfigError: layers keep states, which guesses would change.
    """
    specs = zip(model.layer_range, model.cache_specs, strict=True)
    if layers := [str(layer) for layer, spec in specs if spec.kind.has_states]:
        raise ConfigError(
            f"--speculative-config: layers {shorten(', '.join(layers))} of the draft model "
            f"{config.folder} keep states, which is not served: take a draft model whose layers "
            "all have attention"
        )


def check_memory(config: WorkerConfig, weight_bytes: dict[int, int]) -> None:
    """Check that there is room for the packed weights of these ranks, by their numbers.

    Raises CacheMemoryError: there is not.
    """
    if select_device(config.device).type == "cpu":
        # Pages that are promised are found missing when they are written to, by a kill.
        require_weights(sum(weight_bytes.values()), cpu_memory_bytes(1), CPU_MEMORY)
        return
    for rank, num_bytes in weight_bytes.items():
        device = select_device(config.device, rank)
        free_bytes, total_bytes = torch.cuda.mem_get_info(device)
        if config.kv_cache_memory_bytes is not None:
            require_weights(num_bytes, free_bytes, f"the free memory of {device}")
            continue
        have_bytes = int(total_bytes * config.gpu_memory_utilization) - (total_bytes - free_bytes)
        require_weights(num_bytes, have_bytes, f"--gpu-memory-utilization of {device}")


_LAYER: Final = re.compile(r"model\.layers\.(\d{1,9})\.")
_PIECE_BYTES: Final = 4 * 2**20


def as_stored(config: ModelConfig, folder: Path, names: TensorNames) -> ModelConfig:
    """The configuration, with `dtype` and `tie_word_embeddings` as the folder's files are.

    names: from the files' names to the model's.

    Reads headers, and weights only to compare a tied head with the embedding if it is there.

    Raises ModelFileError: see `all_tensors`; or the files have more or fewer layers.
    """
    tensors = all_tensors(folder)
    by_name = {name: tensor for tensor in tensors if (name := names(tensor.name))}
    _check_layers(config, folder, by_name)
    head, embedding = by_name.get(HEAD), by_name.get(EMBEDDING)
    tied = config.tie_word_embeddings and not _has_packed_head(by_name)
    if tied and head is not None and embedding is not None:
        tied = _are_equal(head, embedding)
    return replace(config, dtype=config.dtype or _dtype(by_name), tie_word_embeddings=tied)


def _has_packed_head(names: Iterable[str]) -> bool:
    prefix = f"{HEAD.rpartition('.')[0]}."
    ends = {name.removeprefix(prefix) for name in names if name.startswith(prefix)}
    return not ends <= {"weight", "bias"}


def _check_layers(
    config: ModelConfig, folder: Path, by_name: Mapping[str, CheckpointTensor]
) -> None:
    # Checked before anything is made for each layer that config.json asks for.
    layers = [int(found[1]) for name in by_name if (found := _LAYER.match(name))]
    num_layers = max(layers, default=-1) + 1
    if num_layers != config.num_layers:
        raise ModelFileError(
            f"{folder}: its settings say {config.num_layers} layers, and its files have weights of "
            f"{num_layers}: they are not of the same model"
        )


def _dtype(by_name: Mapping[str, CheckpointTensor]) -> str:
    num_bytes = Counter[str]()
    for tensor in by_name.values():
        if tensor.dtype in FLOATS:
            num_bytes[dtype_name(FLOATS[tensor.dtype])] += tensor.num_bytes
    return max(num_bytes, key=lambda dtype: num_bytes[dtype], default="")


def _are_equal(one: CheckpointTensor, other: CheckpointTensor) -> bool:
    """Whether two tensors have the same bytes, read piece by piece."""
    return (one.dtype, one.shape) == (other.dtype, other.shape) and all(
        one.read(start, _PIECE_BYTES) == other.read(start, _PIECE_BYTES)
        for start in range(0, one.num_bytes, _PIECE_BYTES)
    )
