"""Llama 2 and 3 (Touvron et al. 2023; Llama team 2024): the common layer, which it made common.

Seed-OSS has it as it is.
"""

from __future__ import annotations

from nanocore.worker.config.config_json import ConfigReader
from nanocore.worker.config.model_config import ModelConfig
from nanocore.worker.layers.decoder import DecoderModel


class LlamaModel(DecoderModel):
    @classmethod
    def read(cls, reader: ConfigReader) -> ModelConfig:
        attention = reader.attention(bias=reader.flag("attention_bias"))
        return reader.model(attention, reader.mlp(bias=reader.flag("mlp_bias")), eos_token_id=2)


class SeedOssModel(DecoderModel):
    """Seed-OSS (ByteDance Seed 2025): biases of Q, K and V."""

    @classmethod
    def read(cls, reader: ConfigReader) -> ModelConfig:
        attention = reader.attention(
            num_kv_heads=8,
            head_dim=128,
            bias=reader.flag("attention_bias", True),
            o_proj_bias=reader.flag("attention_out_bias"),
        )
        return reader.model(attention, reader.mlp(bias=reader.flag("mlp_bias")), eos_token_id=2)
