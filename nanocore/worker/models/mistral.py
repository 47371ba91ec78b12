"""Mistral (Jiang et al. 2023): Llama's layer; early versions have a window in every layer."""

from __future__ import annotations

from nanocore.worker.config.family import Family
from nanocore.worker.config.windows import window_everywhere
from nanocore.worker.layers.decoder import DecoderModel


class MistralModel(DecoderModel):
    """Checkpoints use the common names."""

    family = Family(num_kv_heads=8, eos_token_id=2, window=window_everywhere(4096))
