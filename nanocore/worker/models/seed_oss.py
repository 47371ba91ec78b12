"""Seed-OSS (ByteDance Seed 2025): Llama's layer, with biases of Q, K and V."""

from __future__ import annotations

from msgspec.structs import replace

from nanocore.worker.config.family import Family, no_window
from nanocore.worker.config.json_settings import Settings
from nanocore.worker.config.model_config import ModelConfig
from nanocore.worker.layers.decoder import DecoderModel


def _with_o_proj_bias(settings: Settings, config: ModelConfig) -> ModelConfig:
    return replace(config, o_proj_bias=settings.get("attention_out_bias", bool, False))


class SeedOssModel(DecoderModel):
    family = Family(
        num_kv_heads=8,
        head_dim=128,
        eos_token_id=2,
        bias_setting="attention_bias",
        attention_bias=True,
        mlp_bias_setting=True,
        window=no_window,
        finish=_with_o_proj_bias,
    )
