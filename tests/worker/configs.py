"""Configurations of workers."""

from __future__ import annotations

from typing import Any

from nanocore.worker.messages import WorkerConfig

_VALUES: dict[str, Any] = {
    "folder": "",
    "load_format": "dummy",
    "device": "cpu",
    "dtype": "auto",
    "attention_backend": "auto",
    "quantization": None,
    "kv_cache_dtype": "auto",
    "block_size": 16,
    "max_model_len": 64,
    "max_num_seqs": 2,
    "max_num_batched_tokens": 5,
    "gpu_memory_utilization": 0.9,
    "kv_cache_memory_bytes": None,
    "tensor_parallel_size": 1,
    "pipeline_parallel_size": 1,
    "seed": 0,
    "enforce_eager": False,
    "batch_invariant": False,
    "async_scheduling": None,
}


def make_worker_config(**changes: Any) -> WorkerConfig:
    """A small one."""
    return WorkerConfig(**_VALUES | changes)
