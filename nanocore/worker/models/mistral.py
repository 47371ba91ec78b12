"""Mistral (Jiang et al. 2023): Llama's layer; early versions have a window in every layer."""

from __future__ import annotations

from nanocore.worker.layers.decoder import DecoderModel


class MistralModel(DecoderModel):
    """Checkpoints use the common names."""
