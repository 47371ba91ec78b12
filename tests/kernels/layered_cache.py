"""K and V of a layer as they lie in an engine's KV memory: with other layers between its blocks."""

from __future__ import annotations

from torch import Tensor

from nanocore.kernels.attention import KVCache
from nanocore.kernels.kv_quantization import KVCacheFormat
from nanocore.worker.memory.kv_memory import KVLayout, KVMemory, KVSpec


def layered(
    k_NSKD: Tensor, v_NSKD: Tensor, k_scale: Tensor | None = None, v_scale: Tensor | None = None
) -> KVCache:
    """A cache that holds these. All bytes around it are 255, which is NaN in every float."""
    num_blocks, block_size, num_kv_heads, head_dim = k_NSKD.shape
    form = KVCacheFormat(k_NSKD.dtype, None if k_scale is None else k_scale.dtype)
    specs = [KVSpec(1, 8), KVSpec(num_kv_heads, head_dim), KVSpec(3, 24)]
    memory = KVMemory(KVLayout(specs, form, block_size), num_blocks, k_NSKD.device)
    for block_id in range(num_blocks):
        memory.blocks[0][block_id].fill_(255)
    cache = memory.layer(1)
    for to, values in zip(parts(cache), (k_NSKD, v_NSKD, k_scale, v_scale), strict=False):
        assert values is not None
        to.copy_(values)
    return cache


def parts(cache: KVCache) -> list[Tensor]:
    found = cache.k_NSKD, cache.v_NSKD, cache.k_scale_NSK, cache.v_scale_NSK
    return [x for x in found if x is not None]
