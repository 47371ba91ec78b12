"""Ministral 3 (Mistral AI 2025): Mistral's layer, whose queries grow with the position.

They are multiplied by 1 + beta ln(1 + floor(position / original length)), as in Llama 4: by one up
to the original length of its YaRN, and only so many positions are served.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from nanocore.worker.config.family import Family
from nanocore.worker.config.model_config import ModelConfig
from nanocore.worker.config.settings import Range, Settings
from nanocore.worker.config.windows import window_everywhere
from nanocore.worker.layers.decoder import DecoderModel

DEFAULTS: Final[dict[str, Any]] = {
    "head_dim": 128, "rms_norm_eps": 1e-5, "sliding_window": None,
}  # fmt: skip
"""Where it differs from Mistral."""

_ROPE: Final[dict[str, Any]] = {
    "rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "mscale": 1.0, "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 16_384, "llama_4_scaling_beta": 0.1,
}  # fmt: skip
"""Of files that have no rotary settings."""

_BETA: Final = "llama_4_scaling_beta"
_OWN_NAMES: Final = (_BETA, "max_position_embeddings")
"""What stands among its rotary settings and in no other family's; the second is a copy."""


def translate(settings: Settings) -> Settings:
    """Rotary settings without the queries' growth, which gets a place of its own."""
    name = "rope_scaling" if settings.section("rope_scaling").values else "rope_parameters"
    given = settings.section(name)
    given = given if given.values else given.with_values(_ROPE)
    beta = given.number(_BETA, 0.0, Range(0, 1e3))
    rope = {key: value for key, value in given.values.items() if key not in _OWN_NAMES}
    return settings.with_values({**settings.values, name: rope, _BETA: beta})


def finish(settings: Settings, config: ModelConfig) -> ModelConfig:
    """The configuration with as many positions as queries do not grow in."""
    if not settings.get(_BETA, float, 0.0):
        return config
    most = config.rope["full_attention"].original_max_position_embeddings
    return replace(
        config,
        max_model_len=min(config.max_model_len, most),
        longest_model_len=min(config.longest_model_len, most),
    )


class Ministral3Model(DecoderModel):
    """Checkpoints use the common names."""

    family = Family(
        num_kv_heads=8,
        head_dim=128,
        rms_norm_eps=1e-5,
        eos_token_id=2,
        window=window_everywhere(None),
        translate=translate,
        finish=finish,
    )
