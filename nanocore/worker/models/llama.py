"""Llama 2 and 3 (Touvron et al. 2023; Llama team 2024): the common layer, which it made common."""

from __future__ import annotations

from nanocore.worker.config.config_json import ConfigReader
from nanocore.worker.config.model_config import ModelConfig
from nanocore.worker.layers.decoder import DecoderModel


class LlamaModel(DecoderModel):
    @classmethod
    def read(cls, reader: ConfigReader) -> ModelConfig:
        attention = reader.attention(bias=reader.flag("attention_bias"))
        return reader.model(attention, reader.mlp(bias=reader.flag("mlp_bias")), eos_token_id=2)
