"""Lines that the log of an engine's start begins with: what it serves, on what, and how."""

from __future__ import annotations

import logging
from pathlib import Path

from nanocore import __version__
from nanocore.engine_core.config import EngineConfig
from nanocore.engine_core.process.cache_size import CacheSize
from nanocore.engine_core.process.memory_table import memory_summary
from nanocore.worker.config.model_config import ModelConfig
from nanocore.worker.rank_messages import WorkerInfo

logger = logging.getLogger(__name__)


def log_beginning(config: EngineConfig, folder: Path, model: ModelConfig, imports_s: float) -> None:
    name = f"model {folder} ({model.architecture})"
    tp_size, pp_size = config.tensor_parallel_size, config.pipeline_parallel_size
    where = "one rank, in this process"
    if (num_ranks := tp_size * pp_size) > 1:
        where = f"{num_ranks} ranks (tensor parallel {tp_size}, pipeline parallel {pp_size})"
    logger.info("nanocore %s | %s | %s | endpoint %s", __version__, name, where, config.endpoint)
    logger.info("imports %.2f s, since the process began", imports_s)


def describe_workers(ranks: list[WorkerInfo]) -> str:
    """Describe device, dtype and kernels of the ranks."""
    devices = ", ".join(dict.fromkeys(rank.device for rank in ranks))
    of_kernels = f" ({ranks[0].kernel_variant})" if ranks[0].kernel_variant else ""
    return f"device {devices}, dtype {ranks[0].dtype}, kernels {ranks[0].kernels}{of_kernels}"


def log_settings(
    config: EngineConfig, model: ModelConfig, ranks: list[WorkerInfo], size: CacheSize
) -> None:
    """Log memory, the defaults from generation_config.json, its ignored keys, and what drafts
    promise.
    """
    logger.info("%s", memory_summary(config, ranks, size))
    defaults = model.generation
    if defaults.given:
        given = ", ".join(f"{name} {value}" for name, value in defaults.given.items())
        logger.info("defaults of requests without sampling parameters: %s", given)
    if defaults.ignored:
        logger.info("generation_config.json: ignored: %s", ", ".join(defaults.ignored))
    if (speculative := config.speculative) is None:
        return
    promise = "outputs are the same, token for token"
    if any(rank.numerics is None for rank in ranks):
        promise = "outputs are equal up to numerics: results depend on the batch here"
        if ranks[0].device.startswith("cuda"):
            promise += ", and do not with --batch-invariant"
    most = speculative.num_speculative_tokens
    logger.info(
        "drafts: %s, up to %d of a request in a step; %s", speculative.method, most, promise
    )
