"""The model families, one file each, found by the name in config.json's `architectures`."""

from __future__ import annotations

import torch

from nanocore.worker.model_config import ARCHITECTURES, ModelConfig
from nanocore.worker.models.qwen3 import Qwen3Model

_REGISTRY = {"Qwen3ForCausalLM": Qwen3Model}
assert tuple(_REGISTRY) == ARCHITECTURES


def build_model(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> Qwen3Model:
    """The model of this configuration, its parameters allocated and not yet filled."""
    return _REGISTRY[config.architecture](config, dtype, device)
