"""The model families, one file each, found by the name in config.json's `architectures`."""

from __future__ import annotations

from nanocore.worker.config.model_config import ARCHITECTURES, ModelConfig
from nanocore.worker.layers.decoder import DecoderModel
from nanocore.worker.models.gemma2 import Gemma2Model
from nanocore.worker.models.gemma3 import Gemma3Model
from nanocore.worker.models.llama import LlamaModel
from nanocore.worker.models.mistral import MistralModel
from nanocore.worker.models.phi3 import Phi3Model
from nanocore.worker.models.qwen2 import Qwen2Model
from nanocore.worker.models.qwen2_moe import Qwen2MoeModel
from nanocore.worker.models.qwen3 import Qwen3Model
from nanocore.worker.models.qwen3_moe import Qwen3MoeModel
from nanocore.worker.placement import Placement

_REGISTRY: dict[str, type[DecoderModel]] = {
    "Qwen3ForCausalLM": Qwen3Model,
    "Qwen2ForCausalLM": Qwen2Model,
    "Qwen3MoeForCausalLM": Qwen3MoeModel,
    "Qwen2MoeForCausalLM": Qwen2MoeModel,
    "LlamaForCausalLM": LlamaModel,
    "MistralForCausalLM": MistralModel,
    "Gemma2ForCausalLM": Gemma2Model,
    "Gemma3ForCausalLM": Gemma3Model,
    "Phi3ForCausalLM": Phi3Model,
}
assert tuple(_REGISTRY) == ARCHITECTURES


def build_model(config: ModelConfig, placement: Placement) -> DecoderModel:
    """A rank's part of the model of this configuration, its parameters allocated, not yet filled.

    Raises:
        ConfigError: it cannot be split as the placement asks.
    """
    return _REGISTRY[config.architecture](config, placement)
