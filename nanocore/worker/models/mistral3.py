"""The text part of Mistral Small 3.1 and later, and of Ministral 3; images are not served.

It is a Mistral or a Ministral 3, whose layers are the same.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from nanocore.worker.config.settings import Settings
from nanocore.worker.models import ministral3
from nanocore.worker.models.mistral import MistralModel
from nanocore.worker.models.text_part import TextPart, read_text_config

_DEFAULTS: Final = {"mistral": {}, "ministral3": ministral3.DEFAULTS}


def _translate(settings: Settings) -> Settings:
    kind, text = read_text_config(settings, _DEFAULTS)
    return ministral3.translate(text) if kind == "ministral3" else text


class Mistral3Model(TextPart, MistralModel):
    """Of a model that also sees images."""

    family = replace(
        MistralModel.family,
        tie_word_embeddings=True,
        translate=_translate,
        finish=ministral3.finish,
    )
