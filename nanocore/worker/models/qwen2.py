"""Qwen2 and Qwen2.5 (technical reports, 2024): the common layer, with biases of Q, K and V.

Later layers may have a window.
"""

from __future__ import annotations

from nanocore.worker.layers.decoder import DecoderModel


class Qwen2Model(DecoderModel):
    """Checkpoints use the common names."""
