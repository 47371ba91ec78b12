"""What kernels that are compiled know of the KV memory of a model."""

from __future__ import annotations

from typing import Final

import torch

from nanocore.kernels.kv_quantization import KVCacheFormat
from nanocore.worker.memory.kv_groups import CacheKind
from nanocore.worker.memory.kv_memory import KVLayout, KVSpec

_NUM_LAYERS: Final = 28
_FORMATS: Final = {
    "*fp32": KVCacheFormat(torch.float32),
    "*fp16": KVCacheFormat(torch.float16),
    "*bf16": KVCacheFormat(torch.bfloat16),
    "*i8": KVCacheFormat(torch.int8, torch.float32),
    "*fp8e4nv": KVCacheFormat(torch.float8_e4m3fn, torch.float32),
}


def block_constants(cache: str, kv_heads: int, head_dim: int, block_size: int) -> dict[str, int]:
    """cache: the type of its K and V, as a pointer."""
    layout = KVLayout([KVSpec(kv_heads, head_dim)] * _NUM_LAYERS, _FORMATS[cache], block_size)
    return {"BLOCK_SIZE": block_size, "BLOCK_BYTES": layout.block_bytes[CacheKind()]}
