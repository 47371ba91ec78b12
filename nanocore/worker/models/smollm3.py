"""SmolLM3 (Hugging Face, 2025): Llama's layer, of which every fourth does not rotate.

A window, where one is asked for, is that of the layers without rotation.
"""

from __future__ import annotations

from functools import partial

from nanocore.worker.config.config_json import ConfigReader
from nanocore.worker.config.json_settings import Settings
from nanocore.worker.config.model_config import ModelConfig
from nanocore.worker.config.rope_config import read_rope
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


class SmolLM3Model(DecoderModel):
    @classmethod
    def read(cls, reader: ConfigReader) -> ModelConfig:
        unrotated, window = _unrotated(reader.settings, reader.num_layers), None
        if reader.flag("use_sliding_window"):
            window = reader.settings.nullable("sliding_window", int, None)
        attention = reader.attention(
            num_kv_heads=4,
            bias=reader.flag("attention_bias"),
            windows=(window, lambda layer: window is not None and layer in unrotated),
            free_layer_types=True,
            rope=partial(read_rope, theta=2_000_000.0),
            unrotated_layers=unrotated,
        )
        return reader.model(
            attention,
            reader.mlp(bias=reader.flag("mlp_bias")),
            tie_word_embeddings=True,
            eos_token_id=128001,
        )
