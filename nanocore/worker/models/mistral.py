"""Mistral and its successors: Llama's layer, with a window in every layer, in some or in none.

Mistral (Jiang et al. 2023), Mixtral (Jiang et al. 2024) with experts in place of all MLPs,
Ministral (2024), Ministral 3 (2025), and the text part of Mistral Small 3.1 and later.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Final

from msgspec.structs import replace

from nanocore.worker.config.config_json import ConfigReader
from nanocore.worker.config.json_settings import Range, Settings
from nanocore.worker.config.model_config import ModelConfig
from nanocore.worker.config.rope_config import read_rope
from nanocore.worker.layers.decoder import DecoderModel
from nanocore.worker.models.text_part import TextModelPart, read_text_config


class MistralModel(DecoderModel):
    """Mistral: early versions have a window in every layer."""

    free_layer_types = False

    @classmethod
    def read(cls, reader: ConfigReader) -> ModelConfig:
        attention = reader.attention(
            num_kv_heads=8, windows=reader.windows(4096), free_layer_types=cls.free_layer_types
        )
        return reader.model(attention, reader.mlp(), eos_token_id=2)


class MinistralModel(MistralModel):
    """Ministral: `layer_types` says which layers have a window."""

    free_layer_types = True


_MINISTRAL3_DEFAULTS: Final[dict[str, Any]] = {
    "head_dim": 128, "rms_norm_eps": 1e-5, "sliding_window": None,
}  # fmt: skip
"""Defaults of Ministral 3 that differ from Mistral's."""

_ROPE: Final[dict[str, Any]] = {
    "rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "mscale": 1.0, "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 16_384, "llama_4_scaling_beta": 0.1,
}  # fmt: skip
"""Ministral 3's rotation in files that have no rotary settings."""

_BETA: Final = "llama_4_scaling_beta"
_OWN_NAMES: Final = (_BETA, "max_position_embeddings")
"""Keys of its rotary settings that no other family has; the second is a copy."""


def _within_growth(settings: Settings, config: ModelConfig) -> ModelConfig:
    # Queries are multiplied by 1 + beta ln(1 + floor(position / original length)), as in Llama 4.
    # The factor is one up to the original length, and only so many positions are served.
    if not settings.get(_BETA, float, 0.0):
        return config
    most = config.attention.rope["full_attention"].original_max_position_embeddings
    return replace(
        config,
        max_model_len=min(config.max_model_len, most),
        longest_model_len=min(config.longest_model_len, most),
    )


class Ministral3Model(DecoderModel):
    """Ministral 3: YaRN, and queries that grow with the position."""

    @classmethod
    def translate(cls, settings: Settings) -> Settings:
        # The rotary reader refuses unknown keys, so the queries' growth moves to the file's top.
        name = "rope_scaling" if settings.section("rope_scaling").values else "rope_parameters"
        given = settings.section(name)
        given = given if given.values else given.with_values(_ROPE)
        beta = given.number(_BETA, 0.0, Range(0, 1e3))
        rope = {key: value for key, value in given.values.items() if key not in _OWN_NAMES}
        return settings.with_values({**settings.values, name: rope, _BETA: beta})

    @classmethod
    def read(cls, reader: ConfigReader) -> ModelConfig:
        attention = reader.attention(num_kv_heads=8, head_dim=128, windows=reader.windows(None))
        config = reader.model(attention, reader.mlp(), rms_norm_eps=1e-5, eos_token_id=2)
        return _within_growth(reader.settings, config)


class Mistral3Model(TextModelPart, MistralModel):
    """The text part of a model that also sees images: a Mistral, or a Ministral 3."""

    @classmethod
    def translate(cls, settings: Settings) -> Settings:
        kind, text = read_text_config(settings, {"mistral": {}, "ministral3": _MINISTRAL3_DEFAULTS})
        return Ministral3Model.translate(text) if kind == "ministral3" else text

    @classmethod
    def read(cls, reader: ConfigReader) -> ModelConfig:
        attention = reader.attention(num_kv_heads=8, windows=reader.windows(4096))
        config = reader.model(attention, reader.mlp(), tie_word_embeddings=True, eos_token_id=2)
        return _within_growth(reader.settings, config)


_MIXTRAL_PROJECTIONS: Final = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}


class MixtralModel(DecoderModel):
    """Mixtral; its checkpoints have names of their own for the experts."""

    @classmethod
    def translate(cls, settings: Settings) -> Settings:
        # There are no other MLPs than experts, and their weights always sum to 1.
        experts = {
            "num_local_experts": settings.get(
                "num_local_experts", int, settings.get("num_experts", int, 8)
            ),
            "num_experts_per_tok": settings.get("num_experts_per_tok", int, 2),
            "moe_intermediate_size": settings.size("intermediate_size"),
            "norm_topk_prob": True,
        }
        return settings.with_values(settings.values | experts)

    @classmethod
    def read(cls, reader: ConfigReader) -> ModelConfig:
        rope = partial(read_rope, theta=1_000_000.0)
        return reader.model(
            reader.attention(num_kv_heads=8, windows=reader.windows(None), rope=rope),
            reader.mlp(),
            moe=reader.moe(),
            rms_norm_eps=1e-5,
            eos_token_id=2,
        )

    @classmethod
    def common_name(cls, stored: str) -> str | None:
        name = super().common_name(stored) or ""
        before, is_expert, after = name.partition(".block_sparse_moe.")
        if not is_expert:
            return name or None
        return f"{before}.mlp." + ".".join(_MIXTRAL_PROJECTIONS.get(x, x) for x in after.split("."))
