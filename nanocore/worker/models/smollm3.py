"""SmolLM3 (Hugging Face, 2025): Llama's layer, of which every fourth does not rotate.

A window, where one is asked for, is that of the layers without rotation.
"""

from __future__ import annotations

from msgspec.structs import replace

from nanocore.worker.config.family import Family
from nanocore.worker.config.json_settings import Settings
from nanocore.worker.config.model_config import ModelConfig
from nanocore.worker.layers.decoder import DecoderModel


def _unrotated(settings: Settings, num_layers: int) -> frozenset[int]:
    """Indices of layers that do not rotate: listed as zeros, or else every n-th."""
    every = settings.size("no_rope_layer_interval", 4)
    rotates = settings.get("no_rope_layers", list[int], [])
    if not settings.has("no_rope_layers"):
        rotates = [int((i + 1) % every != 0) for i in range(num_layers)]
    if len(rotates) < num_layers or not {*rotates} <= {0, 1}:
        raise settings.error(
            "no_rope_layers", f"must have {num_layers} entries, 0 for a layer that does not rotate"
        )
    return frozenset(i for i in range(num_layers) if not rotates[i])


def _window(settings: Settings, num_layers: int) -> tuple[int | None, list[bool]]:
    if not settings.get("use_sliding_window", bool, False):
        return None, [False] * num_layers
    window, unrotated = (
        settings.nullable("sliding_window", int, None),
        _unrotated(settings, num_layers),
    )
    return window, [window is not None and i in unrotated for i in range(num_layers)]


def _finish(settings: Settings, config: ModelConfig) -> ModelConfig:
    return replace(config, unrotated_layers=_unrotated(settings, config.num_layers))


class SmolLM3Model(DecoderModel):
    family = Family(
        num_kv_heads=4,
        tie_word_embeddings=True,
        eos_token_id=128001,
        bias_setting="attention_bias",
        biased_o_proj=True,
        mlp_bias_setting=True,
        window=_window,
        free_layer_types=True,
        rope_theta=2_000_000.0,
        finish=_finish,
    )
