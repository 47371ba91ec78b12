"""Phi-3 and Phi-4 (Abdin et al. 2024): the common layer; part of a head may rotate.

Checkpoints hold Q, K and V stacked, and gate and up, each as one tensor. Long contexts are by
LongRoPE.
"""

from __future__ import annotations

from nanocore.protocol.errors import ModelFileError
from nanocore.worker.config.config_json import ConfigReader
from nanocore.worker.config.json_settings import Settings
from nanocore.worker.config.model_config import ModelConfig
from nanocore.worker.config.rope_config import Ropes, read_rope
from nanocore.worker.layers.decoder import DecoderLayer, DecoderModel
from nanocore.worker.layers.mlp import GatedMLP
from nanocore.worker.loading.weights import Entries


class Phi3Layer(DecoderLayer):
    mlp: GatedMLP

    def entries(self, prefix: str) -> Entries:
        attention, mlp = self.mixer, self.mlp
        return {
            **attention.qkv_proj.fused_entries(f"{prefix}self_attn.qkv_proj"),
            **attention.o_proj.entries(f"{prefix}self_attn.o_proj"),
            **mlp.in_proj.fused_entries(f"{prefix}mlp.gate_up_proj"),
            **mlp.down_proj.entries(f"{prefix}mlp.down_proj"),
            **self.norm_entries(prefix),
        }


def _read_rope(settings: Settings, head_dim: int) -> Ropes:
    ropes = read_rope(settings, head_dim)
    kind = ropes["full_attention"].kind
    if kind not in ("default", "longrope"):
        raise ModelFileError(
            f"{settings.source}: rope_type = {kind} is not implemented for this architecture"
        )
    return ropes


class Phi3Model(DecoderModel):
    layer_class = Phi3Layer

    @classmethod
    def translate(cls, settings: Settings) -> Settings:
        # transformers' default, whatever the rotary settings say.
        if settings.is_set("original_max_position_embeddings"):
            return settings
        return settings.with_values(settings.values | {"original_max_position_embeddings": 4096})

    @classmethod
    def read(cls, reader: ConfigReader) -> ModelConfig:
        attention = reader.attention(
            windows=reader.windows(None), rope=_read_rope, partial_rope=True
        )
        return reader.model(attention, reader.mlp(), rms_norm_eps=1e-5, eos_token_id=32000)
