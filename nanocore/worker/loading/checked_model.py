"""What a rank is to hold, known and checked before any memory is taken for it.

config.json may say anything, so a model is first built without memory (on torch's meta device):
files that do not fit it, and memory that does not hold it, are then errors that cost nothing.
"""

from __future__ import annotations

import logging
from pathlib import Path

import torch

from nanocore.protocol.errors import ConfigError
from nanocore.worker.config.model_config import ModelConfig
from nanocore.worker.device.device import dtype_name, select_device, select_dtype
from nanocore.worker.layers.decoder import DecoderModel
from nanocore.worker.loading.formats.select import folder_format, folder_settings
from nanocore.worker.loading.gguf.files import is_gguf
from nanocore.worker.loading.gguf.format import GgufFormat
from nanocore.worker.loading.loader import check_weights
from nanocore.worker.loading.lora.adapter import read_adapter
from nanocore.worker.loading.lora.merged_format import MergedFormat
from nanocore.worker.loading.stored_config import as_stored
from nanocore.worker.loading.weight_format import WeightFormat
from nanocore.worker.memory.kv_cache_bytes import CPU_MEMORY, cpu_memory_bytes, require_weights
from nanocore.worker.messages import WorkerConfig
from nanocore.worker.models import load_model_config, model_class

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
            "%s: the embedding is the head by tie_word_embeddings, and the files have an lm_head "
            "that is not the embedding: it is used",
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
    """How the files store linear layers; with the adapter merged that is to be.

    log: say how, where they are not floats.

    Raises:
        ModelFileError: see `folder_format` and `read_adapter`.
        ConfigError: dummy weights are asked for, which are floats, and the files' are not.
    """
    first, names = Path(config.folder), model_class(model.architecture).common_name
    stored: WeightFormat | None
    if config.load_format == "dummy":
        _check_dummy(first)
        stored = None
    elif is_gguf(first):
        stored = GgufFormat(first, model.head_dim, dtype)
    else:
        stored = folder_format(first, names, log=log)
    if config.merge_lora is None:
        return stored
    return MergedFormat(stored, read_adapter(Path(config.merge_lora), names), dtype)


def check_files(config: WorkerConfig, model: DecoderModel) -> None:
    """Check that the weight files are those of this model, by their headers, and the adapter's.

    Raises:
        ModelFileError: they are not; see `loader.load_weights`.
    """
    entries, weight_format = model.entries(), model.placement.weight_format
    if isinstance(weight_format, MergedFormat):
        weight_format.check_used(entries)
    if config.load_format != "dummy":
        check_weights(Path(config.folder), entries, model.entry_name)


def _check_dummy(first: Path) -> None:
    said = None if is_gguf(first) else folder_settings(first)
    if said is not None:
        raise ConfigError(
            f"--load-format dummy: dummy weights are floats, and {said.source} has {said.name}: "
            "take it out, and use --quantization"
        )


def check_memory(config: WorkerConfig, weight_bytes: dict[int, int]) -> None:
    """Check that there is room for the packed weights of these ranks, by their numbers.

    Raises:
        CacheMemoryError: there is not.
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
