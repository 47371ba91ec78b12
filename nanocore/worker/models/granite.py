"""Granite 3 (IBM, 2024): Llama's layer, with multipliers (maximal update: Yang et al. 2022).

What a layer adds to the residual stream is multiplied there by one number for all. Here the whole
stream is divided by it instead, from the embedding on: norms see no difference, once their epsilon
is divided by its square.
"""

from __future__ import annotations

from typing import Final

from msgspec.structs import replace

from nanocore.worker.config.family import Family, no_window
from nanocore.worker.config.json_settings import Range, Settings
from nanocore.worker.config.model_config import ModelConfig
from nanocore.worker.layers.decoder import DecoderModel
from nanocore.worker.placement import Placement

_MULTIPLIER: Final = Range(1e-4, 1e4)


def _finish(settings: Settings, config: ModelConfig) -> ModelConfig:
    residual = settings.number("residual_multiplier", 1.0, _MULTIPLIER)
    return replace(
        config,
        rms_norm_eps=config.rms_norm_eps / residual**2,
        query_scale=settings.number("attention_multiplier", 1.0, _MULTIPLIER),
        embedding_scale=settings.number("embedding_multiplier", 1.0, _MULTIPLIER) / residual,
        logits_divisor=settings.number("logits_scaling", 1.0, _MULTIPLIER),
    )


class GraniteModel(DecoderModel):
    family = Family(
        eos_token_id=2,
        bias_setting="attention_bias",
        biased_o_proj=True,
        mlp_bias_setting=True,
        window=no_window,
        fits_float16=False,  # the divided stream has several times the range of the original
        finish=_finish,
    )

    def __init__(self, config: ModelConfig, placement: Placement) -> None:
        super().__init__(config, placement)
        self.embedding_factor = config.embedding_scale  # in training it was not rounded
