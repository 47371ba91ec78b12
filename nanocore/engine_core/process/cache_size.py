"""The size of the KV cache and the longest request, from flags and memory."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Final

import msgspec

from nanocore.engine_core.config import EngineConfig
from nanocore.kv_cache import CacheGroup, Capacity
from nanocore.protocol.errors import CacheMemoryError, ConfigError
from nanocore.worker.config.model_config import ModelConfig
from nanocore.worker.memory.kv_groups import KVGroup, joined_groups, rank_slab_bytes
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


class CacheSize(msgspec.Struct, frozen=True):
    """Size of an engine's KV cache.

    kv_groups: of the model's layers. capacity: of every rank. max_model_len: tokens per request.
    """

    kv_groups: list[KVGroup]
    capacity: Capacity
    max_model_len: int

    def rank_bytes(self, rank: WorkerInfo) -> int:
        return self.capacity.num_slabs * rank_slab_bytes(rank.kv_groups, self.kv_groups)


_LARGE_STATES_TOKENS: Final = 512
"""Where the first checkpoint of large states is: see `CacheGroup.spacing`."""
_MIN_TOKENS: Final = 2
"""A request's at least: one that is computed, and one that is sampled."""


def size_cache(config: EngineConfig, ranks: list[WorkerInfo], max_model_len: int) -> CacheSize:
    """Size the KV cache.

    It is what the rank with the least room has, and no more than max_num_seqs requests of that
    length can use; so every rank's slabs are as many.

    Raises:
        CacheMemoryError: a request of max_model_len does not fit, and may not be cut to what fits;
            or there is not so much memory as flags say. ConfigError: no request fits the blocks.
    """
    stages = ranks[:: config.tensor_parallel_size]
    groups = joined_groups([stage.kv_groups for stage in stages])
    slab_bytes = [rank_slab_bytes(rank.kv_groups, groups) for rank in ranks]
    _check_flags(config, ranks, slab_bytes, groups)
    counts = [rank.available_kv_bytes // size for rank, size in zip(ranks, slab_bytes, strict=True)]
    capacity = Capacity(
        _slabs_for(config.num_gpu_blocks_override or 0, groups) or min(counts),
        config.sizes.block_size,
        cache_groups(groups, config.sizes.block_size),
        config.scheduler_config(max_model_len).max_chunk,
    )
    num_needed = capacity.slabs_of(max_model_len)
    if config.num_gpu_blocks_override is not None:
        max_model_len = _length_in_blocks(config, capacity, groups, max_model_len)
    elif capacity.num_slabs >= num_needed:
        num_slabs = min(capacity.num_slabs, num_needed * config.sizes.max_num_seqs)
        capacity = msgspec.structs.replace(capacity, num_slabs=num_slabs)
    elif config.max_model_len == "auto" and capacity.most_tokens >= _MIN_TOKENS:
        max_model_len = capacity.most_tokens
    else:
        size = CacheSize(groups, capacity, max_model_len)
        raise CacheMemoryError(_too_long(config, ranks, counts.index(min(counts)), size))
    return CacheSize(groups, capacity, max_model_len)


def cache_groups(groups: Sequence[KVGroup], block_size: int) -> list[CacheGroup]:
    """Return how the groups' blocks are kept."""
    # A state that takes no more memory than the block of tokens before it is always kept.
    spacings = [
        1 if one.per_slab >= groups[0].per_slab else max(_LARGE_STATES_TOKENS // block_size, 2)
        for one in groups
    ]
    return [
        CacheGroup(one.kind.name, one.kind.window, one.per_slab, spacing * one.kind.has_states)
        for one, spacing in zip(groups, spacings, strict=True)
    ]


def _slabs_for(num_blocks: int, groups: Sequence[KVGroup]) -> int:
    """Return the slabs that hold so many blocks of every group."""
    return sum(-(-num_blocks // group.per_slab) for group in groups)


def _most_blocks(num_slabs: int, groups: Sequence[KVGroup]) -> int:
    """Return how many blocks of every group so many slabs hold."""
    most = int(num_slabs / sum(1 / group.per_slab for group in groups))
    return next(n for n in range(most, -1, -1) if _slabs_for(n, groups) <= num_slabs)


def _length_in_blocks(
    config: EngineConfig, capacity: Capacity, groups: Sequence[KVGroup], max_model_len: int
) -> int:
    """Return max_model_len, or what fits --num-gpu-blocks-override if no length was asked for."""
    num_tokens = capacity.most_tokens
    if num_tokens >= max_model_len:
        return max_model_len
    num_blocks, size = config.num_gpu_blocks_override, capacity.block_size
    blocks = f"--num-gpu-blocks-override {num_blocks}: blocks of {size} hold"
    if num_tokens < _MIN_TOKENS:
        raise ConfigError(f"{blocks} no request of two tokens; raise it, or --block-size")
    if isinstance(config.max_model_len, int):
        num_slabs = capacity.slabs_of(max_model_len)
        num_needed = _most_blocks(num_slabs, groups)
        num_needed += _slabs_for(num_needed, groups) < num_slabs
        raise ConfigError(
            f"{blocks} {num_tokens} tokens, and one request may have --max-model-len "
            f"{max_model_len}: raise the former to {num_needed}, "
            "or lower the latter (or auto)"
        )
    logger.warning(
        "%s %d tokens: max_model_len is that instead of %d", blocks, num_tokens, max_model_len
    )
    return num_tokens


def _check_flags(
    config: EngineConfig, ranks: list[WorkerInfo], slab_bytes: list[int], groups: Sequence[KVGroup]
) -> None:
    """Check that every rank has the memory that flags name."""
    for number, (rank, one_bytes) in enumerate(zip(ranks, slab_bytes, strict=True)):
        where = f" on rank {number}" if len(ranks) > 1 else ""
        have_bytes = rank.memory_bytes
        there_is = f"there are {have_bytes / 1e6:.1f} MB for it{where} beside the weights"
        if config.num_gpu_blocks_override is not None:
            need_bytes = _slabs_for(config.num_gpu_blocks_override, groups) * one_bytes
            if need_bytes > have_bytes:
                raise CacheMemoryError(
                    f"--num-gpu-blocks-override {config.num_gpu_blocks_override}: that many blocks "
                    f"need {need_bytes / 1e6:.1f} MB, and {there_is}: use at most "
                    f"{_most_blocks(have_bytes // one_bytes, groups)}, or leave it out"
                )
        elif (config.kv_cache_memory_bytes or 0) > have_bytes:
            raise CacheMemoryError(
                f"--kv-cache-memory-bytes {config.kv_cache_memory_bytes}: {there_is} (the least of "
                f"the machine, its cgroups and resource limits): use at most {have_bytes}, or "
                "leave it out"
            )


def _too_long(config: EngineConfig, ranks: list[WorkerInfo], tightest: int, size: CacheSize) -> str:
    """Error text: memory needed and available, the longest request that fits, and flags to
    change.
    """
    rank, capacity, max_model_len = ranks[tightest], size.capacity, size.max_model_len
    slab_bytes = rank_slab_bytes(rank.kv_groups, size.kv_groups)
    need_bytes, have_bytes = capacity.slabs_of(max_model_len) * slab_bytes, rank.available_kv_bytes
    longest = capacity.most_tokens
    where = f" on rank {tightest}" if len(ranks) > 1 else ""
    remedies = []
    if need_bytes <= rank.memory_bytes:
        remedies.append(f"--kv-cache-memory-bytes {need_bytes}")
    if longest >= _MIN_TOKENS:
        remedies.insert(0, f"--max-model-len {longest} (or auto)")
    if rank.device.startswith("cuda") and config.kv_cache_memory_bytes is None:
        remedies.append(f"--gpu-memory-utilization above {config.gpu_memory_utilization}")
    if config.kv_cache_dtype == "auto" and need_bytes < 2 * have_bytes:
        remedies.append("--kv-cache-dtype int8")
    return (
        f"the KV cache of one request of {max_model_len} tokens needs {need_bytes / 1e6:.1f} MB"
        f"{where}{capacity.described(max_model_len)}, and there are {have_bytes / 1e6:.1f} MB for "
        f"it, enough for {longest} tokens: use {', or '.join(remedies) or 'a smaller model'}"
    )
