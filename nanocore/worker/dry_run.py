"""Report of every rank without memory behind the model: from shapes and file headers.

Sizes that cannot be divided, files that do not fit the configuration and memory that does not hold
the weights are found in a second. What activations take on CUDA is known only once they run.
"""

from __future__ import annotations

from dataclasses import replace

import msgspec
import torch

from nanocore.worker.communication.communicator import SingleRank
from nanocore.worker.cost.rank_cost import outlined_info
from nanocore.worker.devices import (
    check_batch_invariance,
    check_quantized_linear,
    make_kernels,
    select_device,
    select_kv_format,
)
from nanocore.worker.drafting.draft_model import find_draft_files
from nanocore.worker.loading.checked_model import (
    check_drafts,
    check_files,
    check_memory,
    read_model,
    read_weight_format,
)
from nanocore.worker.memory.kv_cache_bytes import cpu_kv_bytes, cpu_memory_bytes
from nanocore.worker.models import build_model
from nanocore.worker.placement import Placement
from nanocore.worker.rank_messages import WorkerConfig, WorkerInfo


def dry_run(config: WorkerConfig) -> list[WorkerInfo]:
    """Return what each rank would report after loading, in order of rank.

    Raises ConfigError, ModelFileError, CacheMemoryError: why an engine would not start.
    """
    device = select_device(config.device)
    model_config, dtype = read_model(config, device)
    kernels = make_kernels(config, device)
    check_quantized_linear(config.quantization, kernels, dtype, device)
    check_batch_invariance(config, model_config, kernels)
    tp_size, pp_size = config.tensor_parallel_size, config.pipeline_parallel_size
    whole = Placement(
        dtype=dtype,
        device=torch.device("meta"),
        pp_size=pp_size,
        weight_format=read_weight_format(config, model_config, dtype),
    )
    models = [
        build_model(model_config, replace(whole, tp=SingleRank(tp_rank, tp_size), pp_rank=pp_rank))
        for pp_rank in range(pp_size)
        for tp_rank in range(tp_size)
    ]
    check_drafts(config, models[0])
    check_files(config, models[0])
    kv_format = select_kv_format(config.kv_cache_dtype, dtype, device)
    files = find_draft_files(config, model_config, dtype, device)
    drafts = [None if files is None else files.outline(model) for model in models]
    ranks = [
        outlined_info(model, config, kernels, kv_format, device, draft)
        for model, draft in zip(models, drafts, strict=True)
    ]
    weight_bytes = [rank.weight_bytes for rank in ranks]
    check_memory(config, dict(enumerate(weight_bytes)))
    return [
        msgspec.structs.replace(rank, memory_bytes=memory_bytes, available_kv_bytes=kv_bytes)
        for rank, (memory_bytes, kv_bytes) in zip(ranks, _memory(config, weight_bytes), strict=True)
    ]


def _memory(config: WorkerConfig, weight_bytes: list[int]) -> list[tuple[int, int]]:
    asked_bytes, num_ranks = config.kv_cache_memory_bytes, config.num_ranks
    if select_device(config.device).type == "cpu":
        most_bytes = cpu_memory_bytes(num_ranks, sum(weight_bytes))
        kv_bytes = cpu_kv_bytes(most_bytes, num_ranks) if asked_bytes is None else asked_bytes
        return [(most_bytes, kv_bytes)] * num_ranks
    memory = []
    for rank, num_bytes in enumerate(weight_bytes):
        device = select_device(config.device, rank)
        free_bytes, total_bytes = torch.cuda.mem_get_info(device)
        have_bytes = int(total_bytes * config.gpu_memory_utilization) - (total_bytes - free_bytes)
        kv_bytes = have_bytes - num_bytes if asked_bytes is None else asked_bytes
        memory.append((total_bytes - num_bytes, kv_bytes))
    return memory
