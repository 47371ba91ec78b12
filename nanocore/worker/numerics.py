"""The numerics fingerprint: one digest of all that decides the bits of an engine's results.

Engines with equal fingerprints give a request the same logits to the bit, whatever runs beside it.
Each rank makes a digest of what it has (`rank_numerics`), and the engine one of these
(`numerics_fingerprint`). Sizes of steps, rows, blocks and cache are not in it, because results do
not depend on them; where they do, there is no fingerprint.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import msgspec
import torch
import xxhash

from nanocore import __version__
from nanocore.kernels.interface import Kernels
from nanocore.kernels.kv_quantization import KVCacheFormat
from nanocore.worker.config.model_config import ModelConfig
from nanocore.worker.devices import computed_by_torch
from nanocore.worker.layers.rotary import attention_scaling, inverse_frequencies
from nanocore.worker.memory.kv_memory import KV_LAYOUT_VERSION
from nanocore.worker.rank_messages import WorkerConfig, WorkerInfo

_MAX_CUDA_TP: Final = 2
"""NCCL adds more ranks' numbers in an order that the tensor's size decides; two commute."""
_NUM_ROTATED: Final = 64
"""Positions whose rotation stands for all."""


def rank_numerics(
    config: WorkerConfig,
    model: ModelConfig,
    dtype: torch.dtype,
    kernels: Kernels,
    kv_format: KVCacheFormat,
    weights_digest: bytes,
) -> str | None:
    """A rank's part of the fingerprint; None if its results depend on the batch.

    model: as its files have it. weights_digest: of what the rank has read.
    """
    is_batch_invariant = config.batch_invariant and config.tensor_parallel_size <= _MAX_CUDA_TP
    if kernels.name == "cpu":
        is_batch_invariant = not computed_by_torch(config, model)
    if not is_batch_invariant:
        return None
    names = (name for name in model.__struct_fields__ if name != "generation")
    return _digest(
        {
            "versions": [__version__, str(torch.__version__), KV_LAYOUT_VERSION],
            "kernels": [kernels.name, kernels.variant, torch.backends.cpu.get_cpu_capability()],
            "model": {name: getattr(model, name) for name in names},
            "weights": weights_digest.hex(),
            "dtypes": [str(dtype), str(kv_format.dtype), str(kv_format.scale_dtype)],
            "quantization": [config.quantization, config.activation_quantization],
            "ranks": [config.tensor_parallel_size, config.pipeline_parallel_size],
        }
    )


def numerics_fingerprint(
    ranks: Sequence[WorkerInfo], model: ModelConfig, max_model_len: int
) -> str | None:
    """32 lower-case hex digits, of all ranks in their order; None if a rank has none.

    max_model_len: as it is served, by which dynamic NTK and LongRoPE rotate.
    """
    numerics = [rank.numerics for rank in ranks]
    if None in numerics:
        return None
    # What this machine computes of the parameters: libraries differ in the last bit of a cosine.
    positions = torch.arange(_NUM_ROTATED, dtype=torch.float32)
    rotations = []
    for rope in model.attention.rope.values():
        angles = torch.outer(positions, inverse_frequencies(rope, max_model_len))
        rotations += [angles.cos().tolist(), angles.sin().tolist(), attention_scaling(rope)]
    return _digest({"ranks": numerics, "rotations": rotations})


def _digest(said: dict[str, Any]) -> str:
    return xxhash.xxh3_128_hexdigest(msgspec.json.encode(said, order="deterministic"))
