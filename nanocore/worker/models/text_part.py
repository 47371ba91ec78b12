"""What models that also see images have in common; only their text part is served.

config.json keeps its settings in `text_config`, some at its top, and the checkpoint its tensors
under a name of its own, in two spellings. The rest of the checkpoint is not read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from nanocore.worker.config.json_settings import Settings
from nanocore.worker.layers.decoder import DecoderModel

_AT_TOP: Final = (
    "eos_token_id", "dtype", "torch_dtype", "tie_word_embeddings", "quantization_config",
    "compression_config",
)  # fmt: skip
"""What is said of the whole model, and counts for its text part."""

_PARTS: Final = {
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "model.language_model.": "model.",
}
"""The text part's names: those of old files, which vLLM and most checkpoints have, and the new."""

_UNREAD: Final = ("vision_tower.", "multi_modal_projector.")


def read_text_config(
    settings: Settings, defaults: Mapping[str, Mapping[str, Any]]
) -> tuple[str, Settings]:
    """(the text part's kind, its settings).

    Args:
        settings: config.json.
        defaults: of each kind (`model_type`) the values of settings that text_config may leave out;
            the first kind is that of files which name none.

    Raises:
        ModelFileError: another kind.
    """
    text = settings.section("text_config")
    kind = text.get("model_type", str, next(iter(defaults)))
    if kind not in defaults:
        raise text.error("model_type", f"is not implemented; known: {', '.join(defaults)}")
    # As in transformers, whether the head is tied is said of the whole model alone.
    values = {name: value for name, value in text.values.items() if name != "tie_word_embeddings"}
    return kind, text.with_values({**defaults[kind], **values}).with_top(settings, _AT_TOP)


class TextModelPart(DecoderModel):
    """Translates tensors' names; the model's own class follows in the bases."""

    @classmethod
    def common_name(cls, stored: str) -> str | None:
        if stored.removeprefix("model.").startswith(_UNREAD):
            return None
        for prefix, common in _PARTS.items():
            if stored.startswith(prefix):
                return super().common_name(common + stored.removeprefix(prefix))
        return super().common_name(stored)
