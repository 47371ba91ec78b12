"""Configurations of workers."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from nanocore.engine_core.config import EngineConfig
from nanocore.worker.rank_messages import WorkerConfig

_ENGINE: Final = EngineConfig(
    load_format="dummy", device="cpu", block_size=16, max_num_seqs=2, max_num_batched_tokens=5
)


def make_worker_config(**changes: Any) -> WorkerConfig:
    return msgspec.structs.replace(_ENGINE.worker_config("", max_model_len=64), **changes)
