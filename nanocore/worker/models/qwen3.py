"""Qwen3 (technical report, 2025): the common layer, with QK-norm."""

from __future__ import annotations

from nanocore.worker.layers.decoder import DecoderModel


class Qwen3Model(DecoderModel):
    """Checkpoints use the common names."""
