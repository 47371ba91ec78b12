"""Gemma 3 (technical report, 2025), its text models: Gemma 2's layer with QK-norm, and no caps.

Most layers have a window, and rotate by a table of their own.
"""

from __future__ import annotations

from dataclasses import replace

from nanocore.worker.config.family import Softcap
from nanocore.worker.config.windows import window_with_gaps
from nanocore.worker.models.gemma2 import Gemma2Model


class Gemma3Model(Gemma2Model):
    """Checkpoints use Gemma 2's names."""

    family = replace(
        Gemma2Model.family,
        window=window_with_gaps(6, "sliding_window_pattern"),
        rope_by_layer_type=True,
        attn_logit_softcapping=None,  # transformers' Gemma 3 does not cap attention
        final_logit_softcapping=Softcap(None),
        qk_norm=True,
    )
