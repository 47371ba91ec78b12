"""The number of KV blocks and the longest request, from flags and memory."""

from __future__ import annotations

import logging

from nanocore.engine_core.config import EngineConfig
from nanocore.protocol.errors import CacheMemoryError, ConfigError
from nanocore.worker.config.model_config import ModelConfig
from nanocore.worker.rank_messages import WorkerInfo

logger = logging.getLogger(__name__)


def longest_request(config: EngineConfig, model: ModelConfig) -> int:
    """Return --max-model-len, or the model's length if the flag is left out or "auto".

    A model with dynamic NTK or LongRoPE serves more if asked, and then rotates all of it otherwise.

    Raises:
        ConfigError: the model does not serve so many positions.
    """
    if not isinstance(config.max_model_len, int):
        return model.max_model_len
    if config.max_model_len > model.longest_model_len:
        raise ConfigError(
            f"--max-model-len {config.max_model_len}: the model has {model.longest_model_len} "
            f"positions: use at most {model.longest_model_len}"
        )
    return config.max_model_len


def size_cache(
    config: EngineConfig, ranks: list[WorkerInfo], max_model_len: int
) -> tuple[int, int]:
    """Return the number of KV blocks, and the limit of tokens per request.

    The pool is what the rank with the least room has, and no more than max_num_seqs requests of
    that length can use; so every rank's blocks are the same.

    Raises:
        CacheMemoryError: a request of max_model_len does not fit, and may not be cut to what fits;
            or there is not so much memory as flags say. ConfigError: no request fits the blocks.
    """
    _check_flags(config, ranks)
    block_size = config.sizes.block_size
    fits_auto = config.max_model_len == "auto"
    num_needed = -(-max_model_len // block_size)
    if config.num_gpu_blocks_override is not None:
        return config.num_gpu_blocks_override, _length_in_blocks(config, max_model_len)
    tightest = min(ranks, key=lambda rank: rank.available_kv_bytes // rank.kv_block_bytes)
    num_blocks = tightest.available_kv_bytes // tightest.kv_block_bytes
    if num_blocks >= num_needed:
        return min(num_blocks, num_needed * config.sizes.max_num_seqs), max_model_len
    if fits_auto and num_blocks * block_size >= 2:
        return num_blocks, num_blocks * block_size
    raise CacheMemoryError(_too_long(config, ranks, tightest, max_model_len))


def _length_in_blocks(config: EngineConfig, max_model_len: int) -> int:
    """Return max_model_len, or what fits --num-gpu-blocks-override if no length was asked for."""
    num_blocks = config.num_gpu_blocks_override or 0
    num_tokens = num_blocks * config.sizes.block_size
    if num_tokens >= max_model_len:
        return max_model_len
    blocks = f"--num-gpu-blocks-override {num_blocks}: blocks of {config.sizes.block_size} hold"
    if num_tokens < 2:
        raise ConfigError(f"{blocks} no request of two tokens; raise it, or --block-size")
    if isinstance(config.max_model_len, int):
        raise ConfigError(
            f"{blocks} {num_tokens} tokens, and one request may have --max-model-len "
            f"{max_model_len}: raise the former to {-(-max_model_len // config.sizes.block_size)}, "
            "or lower the latter (or auto)"
        )
    logger.warning(
        "%s %d tokens: max_model_len is that instead of %d", blocks, num_tokens, max_model_len
    )
    return num_tokens


def _check_flags(config: EngineConfig, ranks: list[WorkerInfo]) -> None:
    """Check that every rank has the memory that flags name."""
    for number, rank in enumerate(ranks):
        where = f" on rank {number}" if len(ranks) > 1 else ""
        have_bytes = rank.memory_bytes
        there_is = f"there are {have_bytes / 1e6:.1f} MB for it{where} beside the weights"
        if config.num_gpu_blocks_override is not None:
            need_bytes = config.num_gpu_blocks_override * rank.kv_block_bytes
            if need_bytes > have_bytes:
                raise CacheMemoryError(
                    f"--num-gpu-blocks-override {config.num_gpu_blocks_override}: that many blocks "
                    f"need {need_bytes / 1e6:.1f} MB, and {there_is}: use at most "
                    f"{have_bytes // rank.kv_block_bytes}, or leave it out"
                )
        elif (config.kv_cache_memory_bytes or 0) > have_bytes:
            raise CacheMemoryError(
                f"--kv-cache-memory-bytes {config.kv_cache_memory_bytes}: {there_is} (the least of "
                f"the machine, its cgroups and resource limits): use at most {have_bytes}, or "
                "leave it out"
            )


def _too_long(
    config: EngineConfig, ranks: list[WorkerInfo], tightest: WorkerInfo, max_model_len: int
) -> str:
    """Error text: memory needed and available, the longest request that fits, and flags to
    change.
    """
    need_bytes = -(-max_model_len // config.sizes.block_size) * tightest.kv_block_bytes
    have_bytes = tightest.available_kv_bytes
    longest = have_bytes // tightest.kv_block_bytes * config.sizes.block_size
    where = f" on rank {ranks.index(tightest)}" if len(ranks) > 1 else ""
    remedies = []
    if need_bytes <= tightest.memory_bytes:
        remedies.append(f"--kv-cache-memory-bytes {need_bytes}")
    if longest >= 2:
        remedies.insert(0, f"--max-model-len {longest} (or auto)")
    if tightest.device.startswith("cuda") and config.kv_cache_memory_bytes is None:
        remedies.append(f"--gpu-memory-utilization above {config.gpu_memory_utilization}")
    if config.kv_cache_dtype == "auto":
        remedies.append("--kv-cache-dtype int8")
    return (
        f"the KV cache of one request of {max_model_len} tokens needs {need_bytes / 1e6:.1f} MB"
        f"{where}, and there are {have_bytes / 1e6:.1f} MB for it, enough for {longest} tokens: "
        f"use {', or '.join(remedies) or 'a smaller model'}"
    )
