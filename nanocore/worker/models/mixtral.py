"""Mixtral (Jiang et al. 2024): Mistral with experts in place of all MLPs."""

from __future__ import annotations

from typing import Final

from nanocore.worker.config.family import Family
from nanocore.worker.config.settings import Settings
from nanocore.worker.config.windows import window_everywhere
from nanocore.worker.layers.decoder import DecoderModel
from nanocore.worker.layers.moe import SparseDecoderLayer

_PROJECTIONS: Final = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}


def _translate(settings: Settings) -> Settings:
    """There are no other MLPs than experts, and their weights always sum to 1."""
    experts = {
        "num_local_experts": settings.get(
            "num_local_experts", int, settings.get("num_experts", int, 8)
        ),
        "num_experts_per_tok": settings.get("num_experts_per_tok", int, 2),
        "moe_intermediate_size": settings.size("intermediate_size"),
        "norm_topk_prob": True,
    }
    return settings.with_values(settings.values | experts)


class MixtralModel(DecoderModel):
    """Checkpoints have names of their own for the experts."""

    family = Family(
        num_kv_heads=8,
        rms_norm_eps=1e-5,
        rope_theta=1_000_000.0,
        eos_token_id=2,
        window=window_everywhere(None),
        sparse=True,
        translate=_translate,
    )
    layer_class = SparseDecoderLayer

    @classmethod
    def common_name(cls, stored: str) -> str | None:
        name = super().common_name(stored) or ""
        before, is_expert, after = name.partition(".block_sparse_moe.")
        if not is_expert:
            return name or None
        return f"{before}.mlp." + ".".join(_PROJECTIONS.get(x, x) for x in after.split("."))
