"""`nanocore-engine --check`: would an engine start with these flags?

Reads no weights, but to see whether a head that should be the embedding is. What the machine gives
is measured, in tens of milliseconds.
"""

from __future__ import annotations

import logging
from pathlib import Path

import msgspec
import torch

from nanocore.engine_core.config import EngineConfig
from nanocore.engine_core.process.cache_size import longest_request, size_cache
from nanocore.engine_core.process.forecast import forecast
from nanocore.engine_core.process.forecast_table import table
from nanocore.engine_core.process.process import describe_workers, find_model
from nanocore.protocol.sockets import EngineKeys
from nanocore.worker.device.device import select_device
from nanocore.worker.dry_run import dry_run
from nanocore.worker.machine_speed import measure_speed
from nanocore.worker.messages import WorkerInfo
from nanocore.worker.model_cost import MachineSpeed
from nanocore.worker.models import load_model_config

logger = logging.getLogger(__name__)


def check_engine(config: EngineConfig, as_json: bool = False) -> None:
    """Log what an engine would have, and print what that gives, at the best, to stdout.

    Raises:
        StartError: why it would not start.
    """
    if config.curve_dir is not None:
        EngineKeys.load(Path(config.curve_dir))
    config = config.for_device(select_device(config.device).type)
    folder = find_model(config)
    model_config = load_model_config(folder, config.hf_overrides)
    max_model_len = longest_request(config, model_config)
    ranks = dry_run(config.worker_config(str(folder), max_model_len))
    num_blocks, max_model_len = size_cache(config, ranks, max_model_len)
    logger.info("model %s (%s), %s", folder, model_config.architecture, describe_workers(ranks))
    for number, rank in enumerate(ranks):
        logger.info(
            "rank %d: %.1f MB of weights, %.1f MB for KV",
            number,
            rank.weight_bytes / 1e6,
            num_blocks * rank.kv_block_bytes / 1e6,
        )
    logger.info(
        "%d blocks of %d tokens, requests of %d tokens at most: an engine would start",
        num_blocks,
        config.sizes.block_size,
        max_model_len,
    )
    model = str(folder), model_config.architecture
    expected = forecast(config, model, ranks, (num_blocks, max_model_len), measure_speeds(ranks))
    print(msgspec.json.encode(expected).decode() if as_json else table(expected))


def measure_speeds(ranks: list[WorkerInfo]) -> list[MachineSpeed]:
    """Of each rank of a dry run: of its share of the CPU's cores, or of a GPU like the first."""
    device, dtype = torch.device(ranks[0].device), getattr(torch, ranks[0].dtype)
    read_bytes = [int(rank.cost.read_weight_bytes(1)) for rank in ranks if rank.cost is not None]
    if device.type != "cpu":
        return [measure_speed(device, dtype, max(read_bytes))] * len(ranks)
    whole = measure_speed(device, dtype, sum(read_bytes))
    return [whole.shared(len(ranks))] * len(ranks)
