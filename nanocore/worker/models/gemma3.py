"""Gemma 3 (technical report, 2025), its text models: Gemma 2's layer with QK-norm, and no caps.

Most layers have a window, and rotate by a table of their own.
"""

from __future__ import annotations

from nanocore.worker.config.family import Family, Softcap
from nanocore.worker.config.windows import window_with_gaps
from nanocore.worker.layers.decoder import DecoderModel
from nanocore.worker.models.gemma2 import Gemma2Layer


class Gemma3Model(DecoderModel):
    """Checkpoints use Gemma 2's names."""

    family = Family(
        num_kv_heads=4,
        head_dim=256,
        tie_word_embeddings=True,
        eos_token_id=1,
        activation="gelu_pytorch_tanh",
        activation_setting="hidden_activation",
        bias_setting="attention_bias",
        biased_o_proj=True,
        window=window_with_gaps(6, "sliding_window_pattern"),
        free_layer_types=True,
        rope_by_layer_type=True,
        query_pre_attn_scalar=256,
        final_logit_softcapping=Softcap(None),  # transformers' Gemma 3 does not cap attention
        scaled_embedding=True,
        qk_norm=True,
        norm_offset=1.0,
        fits_float16=False,
    )
    layer_class = Gemma2Layer
