"""The text part of Gemma 3 with 4 to 27 billion parameters; images are not served.

Its layers are those of the text models.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from nanocore.worker.config.settings import Settings
from nanocore.worker.models.gemma3 import Gemma3Model
from nanocore.worker.models.text_part import TextPart, read_text_config

_DEFAULTS: Final[dict[str, Any]] = {
    "vocab_size": 262_208, "num_attention_heads": 8, "max_position_embeddings": 131_072,
}  # fmt: skip
"""Published files leave these out, beside what the family has defaults for."""


def _translate(settings: Settings) -> Settings:
    return read_text_config(settings, {"gemma3_text": _DEFAULTS})[1]


class Gemma3ImageTextModel(TextPart, Gemma3Model):
    """Of a model that also sees images."""

    family = replace(Gemma3Model.family, translate=_translate)
