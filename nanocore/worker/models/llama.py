"""Llama 2 and 3 (Touvron et al. 2023; Llama team 2024): the common layer, which it made common."""

from __future__ import annotations

from nanocore.worker.config.family import Family, no_window
from nanocore.worker.layers.decoder import DecoderModel


class LlamaModel(DecoderModel):
    family = Family(
        eos_token_id=2,
        bias_setting="attention_bias",
        biased_o_proj=True,
        mlp_bias_setting=True,
        window=no_window,
    )
