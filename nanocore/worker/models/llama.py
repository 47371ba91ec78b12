"""Llama 2 and 3 (Touvron et al. 2023; Llama team 2024): the common layer, which it made common."""

from __future__ import annotations

from nanocore.worker.layers.decoder import DecoderModel


class LlamaModel(DecoderModel):
    """Checkpoints use the common names."""
