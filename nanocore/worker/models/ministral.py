"""Ministral (Mistral AI 2024): Mistral's layer, of which some have a window and some have none."""

from __future__ import annotations

from dataclasses import replace

from nanocore.worker.models.mistral import MistralModel


class MinistralModel(MistralModel):
    """Checkpoints use the common names."""

    family = replace(MistralModel.family, free_layer_types=True)
