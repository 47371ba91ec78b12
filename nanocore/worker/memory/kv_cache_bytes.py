"""How much memory a rank's KV cache may take.

On CUDA: what the user's share of the device leaves beside weights and the largest step, which is
run once to find out. On a CPU: a share of what is free, so that other programs live, up to a cap.
Users may ask for more than such a share, and not for more than there is.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Final

import torch

from nanocore.protocol.errors import CacheMemoryError
from nanocore.worker.memory.host_memory import host_bytes, process_bytes

CPU_KV_SHARE: Final = 0.4
CPU_KV_CAP_BYTES: Final = 8 * 2**30
CPU_MEMORY: Final = "the memory that this engine can have"


def cpu_memory_bytes(num_ranks: int, taken_bytes: int = 0) -> int:
    """Bytes that each of the ranks on this host can have, once taken_bytes more are in use."""
    most_bytes = (host_bytes() - taken_bytes) // num_ranks
    if (own_bytes := process_bytes()) is not None:
        most_bytes = min(most_bytes, own_bytes - taken_bytes // num_ranks)
    return max(0, most_bytes)


def require_weights(need_bytes: int, have_bytes: int, what: str) -> None:
    """Compare what weights need with what there is, before they are read.

    Raises CacheMemoryError: it is too little.
    """
    if need_bytes > have_bytes:
        raise CacheMemoryError(
            f"the weights need {need_bytes / 1e6:.1f} MB, and {what} is {have_bytes / 1e6:.1f} MB: "
            "use a smaller --dtype or model, or more ranks on more devices"
        )


def cpu_kv_bytes(memory_bytes: int, num_ranks: int) -> int:
    """Bytes for each rank's KV cache where nobody asks for more. memory_bytes: see above."""
    return min(int(memory_bytes * CPU_KV_SHARE), CPU_KV_CAP_BYTES // num_ranks)


def cuda_kv_bytes(
    device: torch.device, utilization: float, run_largest_step: Callable[[], int]
) -> int:
    """Bytes on this device, with weights loaded.

    What other processes hold is taken off, as it is after the step: a neighbour that comes or goes
    meanwhile changes the figure and nothing else. (vLLM's rule, without its failing on that.)

    Args:
        run_largest_step: may keep memory, which then is not the KV cache's; returns how many bytes
        more of it there will be.

    Raises:
        CacheMemoryError: the share is used up already.
    """
    torch.cuda.empty_cache()  # what loading has left would hide what graphs keep
    torch.cuda.reset_peak_memory_stats(device)
    reserved_bytes = torch.cuda.memory_reserved(device)
    later_bytes = run_largest_step()
    torch.cuda.synchronize(device)
    peak_bytes = torch.cuda.max_memory_allocated(device)
    gc.collect()
    torch.cuda.empty_cache()
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    outside_torch_bytes = total_bytes - free_bytes - torch.cuda.memory_reserved(device)
    kept_bytes = max(0, torch.cuda.memory_reserved(device) - reserved_bytes) + later_bytes
    kv_bytes = int(total_bytes * utilization) - peak_bytes - outside_torch_bytes - kept_bytes
    if kv_bytes <= 0:
        raise CacheMemoryError(
            f"--gpu-memory-utilization {utilization}: {utilization * total_bytes / 1e9:.1f} GB of "
            f"{device} leave nothing for the KV cache: weights and the largest step take "
            f"{peak_bytes / 1e9:.1f} GB, graphs {kept_bytes / 1e9:.1f} GB, the CUDA context and "
            f"other processes {outside_torch_bytes / 1e9:.1f} GB; raise it, or lower "
            "--max-num-batched-tokens"
        )
    return kv_bytes
