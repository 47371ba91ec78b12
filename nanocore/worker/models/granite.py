"""Granite 3 (IBM, 2024): Llama's layer, with multipliers (maximal update: Yang et al. 2022).

What a layer adds to the residual stream is multiplied there by one number for all. Here the whole
stream is divided by it instead, from the embedding on: norms see no difference, once their epsilon
is divided by its square.
"""

from __future__ import annotations

from functools import partial

from msgspec.structs import replace

from nanocore.worker.config.config_json import ConfigReader
from nanocore.worker.config.json_settings import Range
from nanocore.worker.config.model_config import ModelConfig
from nanocore.worker.layers.decoder import DecoderModel
from nanocore.worker.placement import Placement


class GraniteConfig(ModelConfig, frozen=True, kw_only=True):
    """embedding_scale: what embeddings are multiplied by. logits_divisor: of logits."""

    embedding_scale: float
    logits_divisor: float


class GraniteModel(DecoderModel):
    config: GraniteConfig

    def __init__(self, config: GraniteConfig, placement: Placement) -> None:
        super().__init__(config, placement)
        self.embedding_factor = config.embedding_scale  # in training it was not rounded
        self.hidden_factor = config.logits_divisor

    @classmethod
    def read(cls, reader: ConfigReader) -> ModelConfig:
        number = partial(reader.settings.number, default=1.0, limits=Range(1e-4, 1e4))
        residual = number("residual_multiplier")
        config = reader.model(
            reader.attention(
                bias=reader.flag("attention_bias"), scale=number("attention_multiplier")
            ),
            reader.mlp(bias=reader.flag("mlp_bias")),
            GraniteConfig,
            eos_token_id=2,
            fits_float16=False,  # the divided stream has several times the range of the original
            embedding_scale=number("embedding_multiplier") / residual,
            logits_divisor=number("logits_scaling"),
        )
        return replace(config, norm_eps=config.norm_eps / residual**2)

    def finish(self) -> None:
        if self.norm is not None:
            # Which divides the logits, and costs nothing.
            self.norm.weight = self.norm.weight / self.config.logits_divisor
