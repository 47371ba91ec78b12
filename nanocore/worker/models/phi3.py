"""Phi-3 and Phi-4 (Abdin et al. 2024): the common layer; part of a head may rotate.

Checkpoints hold Q, K and V stacked, and gate and up, each as one tensor. Long contexts are by
LongRoPE.
"""

from __future__ import annotations

from nanocore.worker.config.family import Family, window_everywhere
from nanocore.worker.config.json_settings import Settings
from nanocore.worker.layers.decoder import DecoderLayer, DecoderModel
from nanocore.worker.layers.mlp import GatedMLP
from nanocore.worker.loading.weights import Entries


class Phi3Layer(DecoderLayer):
    mlp: GatedMLP

    def entries(self, prefix: str) -> Entries:
        attention, mlp = self.attention, self.mlp
        return {
            **attention.qkv_proj.fused_entries(f"{prefix}self_attn.qkv_proj"),
            **attention.o_proj.entries(f"{prefix}self_attn.o_proj"),
            **mlp.gate_up_proj.fused_entries(f"{prefix}mlp.gate_up_proj"),
            **mlp.down_proj.entries(f"{prefix}mlp.down_proj"),
            **self.norm_entries(prefix),
        }


def _with_original_length(settings: Settings) -> Settings:
    # transformers' default, whatever the rotary settings say.
    if settings.is_set("original_max_position_embeddings"):
        return settings
    return settings.with_values(settings.values | {"original_max_position_embeddings": 4096})


class Phi3Model(DecoderModel):
    family = Family(
        rms_norm_eps=1e-5,
        eos_token_id=32000,
        window=window_everywhere(None),
        rope_kinds=("default", "longrope"),
        partial_rotary=True,
        translate=_with_original_length,
    )
    layer_class = Phi3Layer
