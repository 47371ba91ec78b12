"""Gemma 3 (technical report, 2025), its text models: Gemma 2's layer with QK-norm, and no caps.

Most layers have a window, and rotate by a table of their own.
"""

from __future__ import annotations

from nanocore.worker.models.gemma2 import Gemma2Model


class Gemma3Model(Gemma2Model):
    """Checkpoints use Gemma 2's names."""
