"""The model families: how each reads config.json, its layer, and what is odd about it.

A model's class is found by the name in config.json's `architectures`, and its file is imported when
such a model is read: the names alone need no torch. docs/add-a-model.md says how to add a family.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from difflib import SequenceMatcher
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from msgspec.structs import replace

from nanocore.protocol.errors import ModelFileError, shorten
from nanocore.worker.config.config_json import ConfigReader, refuse_other_kinds
from nanocore.worker.config.generation_config import override_generation
from nanocore.worker.config.json_settings import Settings, check_all_read, note_oddity, override
from nanocore.worker.config.model_config import ModelConfig
from nanocore.worker.loading.gguf.gguf_config import config_settings, has_bias
from nanocore.worker.loading.gguf.gguf_files import is_gguf, read_headers
from nanocore.worker.loading.gguf.model_files import generation_settings

if TYPE_CHECKING:
    from nanocore.worker.layers.decoder import DecoderModel
    from nanocore.worker.placement import Placement

ARCHITECTURES: Final = {
    "GPT2LMHeadModel": ("gpt2.GPT2Model", "gpt2"),
    "Gemma2ForCausalLM": ("gemma.Gemma2Model", "gemma2"),
    "Gemma3ForCausalLM": ("gemma.Gemma3Model", "gemma3_text"),
    "Gemma3ForConditionalGeneration": ("gemma.Gemma3ImageTextModel", "gemma3"),
    "GemmaForCausalLM": ("gemma.GemmaModel", "gemma"),
    "GraniteForCausalLM": ("granite.GraniteModel", "granite"),
    "Lfm2ForCausalLM": ("lfm2.Lfm2Model", "lfm2"),
    "Lfm2MoeForCausalLM": ("lfm2.Lfm2MoeModel", "lfm2_moe"),
    "LlamaForCausalLM": ("llama.LlamaModel", "llama"),
    "Ministral3ForCausalLM": ("mistral.Ministral3Model", "ministral3"),
    "MinistralForCausalLM": ("mistral.MinistralModel", "ministral"),
    "Mistral3ForConditionalGeneration": ("mistral.Mistral3Model", "mistral3"),
    "MistralForCausalLM": ("mistral.MistralModel", "mistral"),
    "MixtralForCausalLM": ("mistral.MixtralModel", "mixtral"),
    "Olmo2ForCausalLM": ("olmo2.Olmo2Model", "olmo2"),
    "Phi3ForCausalLM": ("phi3.Phi3Model", "phi3"),
    "Qwen2ForCausalLM": ("qwen.Qwen2Model", "qwen2"),
    "Qwen2MoeForCausalLM": ("qwen.Qwen2MoeModel", "qwen2_moe"),
    "Qwen3ForCausalLM": ("qwen.Qwen3Model", "qwen3"),
    "Qwen3MoeForCausalLM": ("qwen.Qwen3MoeModel", "qwen3_moe"),
    "Qwen3NextForCausalLM": ("qwen_hybrid.Qwen3NextModel", "qwen3_next"),
    "Qwen3_5ForCausalLM": ("qwen_hybrid.Qwen35Model", "qwen3_5_text"),
    "Qwen3_5ForConditionalGeneration": ("qwen_hybrid.Qwen35Model", "qwen3_5"),
    "Qwen3_5MoeForCausalLM": ("qwen_hybrid.Qwen35MoeModel", "qwen3_5_moe_text"),
    "Qwen3_5MoeForConditionalGeneration": ("qwen_hybrid.Qwen35MoeModel", "qwen3_5_moe"),
    "SeedOssForCausalLM": ("llama.SeedOssModel", "seed_oss"),
    "SmolLM3ForCausalLM": ("smollm3.SmolLM3Model", "smollm3"),
}
"""File and class of each, and the `model_type` that stands for it where none is named."""
_BY_MODEL_TYPE: Final = {model_type: name for name, (_, model_type) in ARCHITECTURES.items()}

_MAX_NAME: Final = 80
"""Characters of an unknown architecture's name that are compared: a file may make it any length."""


def model_class(architecture: str) -> type[DecoderModel]:
    file, name = ARCHITECTURES[architecture][0].split(".")
    found: type[DecoderModel] = getattr(import_module(f"{__name__}.{file}"), name)
    return found


def build_model(config: ModelConfig, placement: Placement) -> DecoderModel:
    """A rank's part of the model of this configuration, its parameters allocated, not yet filled.

    Raises ConfigError: it cannot be split as the placement asks.
    """
    return model_class(config.architecture)(config, placement)


def load_model_config(
    folder: Path,
    overrides: Mapping[str, Any] | None = None,
    of_generation: Mapping[str, Any] | None = None,
) -> ModelConfig:
    """Read config.json and generation_config.json of a Hugging Face folder.

    overrides: values that replace config.json's, see `config.json_settings`. of_generation: those
    that replace generation_config.json's.

    Raises:
        ModelFileError: a missing or malformed file, an unknown architecture, or a setting that is
            not implemented. ConfigError: an override that nothing reads.
    """
    if found := is_gguf(folder):
        stored, generation = config_settings(folder), generation_settings(folder)
    else:
        stored, generation = _read_folder(folder)
    settings = override(stored, overrides or {})
    config = read_model_config(settings, generation, found)
    if found and config.attention.o_proj_bias:
        has_one = has_bias(read_headers(folder), "attn_output")
        config = replace(config, attention=replace(config.attention, o_proj_bias=has_one))
    check_all_read(settings, overrides or {})
    return replace(config, generation=override_generation(config.generation, of_generation or {}))


def _read_folder(folder: Path) -> tuple[Settings, Settings]:
    if not folder.is_dir():
        raise ModelFileError(
            f"model {str(folder)!r} is not a folder: give the path of a folder in Hugging Face "
            "format (config.json, *.safetensors, tokenizer.json)"
        )
    path = folder / "generation_config.json"
    is_there = path.exists() or path.is_symlink()  # a link to nothing is an error
    generation = Settings.read(path) if is_there else Settings(path, {})
    return Settings.read(folder / "config.json"), generation


def read_model_config(
    settings: Settings, generation: Settings, is_gguf: bool = False
) -> ModelConfig:
    """The contents of config.json and generation_config.json. is_gguf: see `ConfigReader`.

    Raises ModelFileError: see `load_model_config`.
    """
    names = settings.get("architectures", list[str], []) or _by_model_type(settings)
    if not names:
        known = ", ".join(ARCHITECTURES)
        raise settings.error("architectures", f"must name what the model is; known: {known}")
    architecture = names[0]
    if (whole := f"{architecture.removesuffix('Model')}ForCausalLM") in ARCHITECTURES:
        note_oddity(
            f"{settings.source}: {architecture} is {whole} without its head: the embedding is used "
            "for one, so text may make no sense where embeddings do"
        )
        architecture = whole
        settings = settings.with_values({**settings.values, "tie_word_embeddings": True})
    if architecture not in ARCHITECTURES:
        raise ModelFileError(
            f"{settings.source}: architecture {shorten(repr(architecture))} is unknown"
            f"{_nearest(architecture)}; known: {', '.join(ARCHITECTURES)}"
        )
    model = model_class(architecture)
    settings = model.translate(settings)
    refuse_other_kinds(settings)
    return model.read(ConfigReader(architecture, settings, generation, is_gguf))


def _by_model_type(settings: Settings) -> list[str]:
    model_type = settings.get("model_type", str, "")
    if model_type not in _BY_MODEL_TYPE:
        return []
    found = _BY_MODEL_TYPE[model_type]
    note_oddity(f"{settings.source} names no architectures: {model_type!r} is {found}")
    return [found]


def _nearest(architecture: str) -> str:
    name = architecture[:_MAX_NAME]
    near = [known for known in ARCHITECTURES if _are_alike(_stem(name), _stem(known))]
    if not near:
        return ""
    return f", the nearest that is served is {max(near, key=lambda known: _likeness(name, known))}"


def _are_alike(stem: str, known: str) -> bool:
    """Whether they are one word in different versions (Olmo3), or differ by a letter or so."""
    word, known_word = (re.split(r"\d", x)[0] for x in (stem, known))
    return word == known_word or _likeness(stem, known) >= 0.8


def _likeness(one: str, other: str) -> float:
    return SequenceMatcher(None, one.lower(), other.lower()).ratio()


def _stem(architecture: str) -> str:
    return architecture.split("For")[0].removesuffix("Model").removesuffix("LMHead").lower()
