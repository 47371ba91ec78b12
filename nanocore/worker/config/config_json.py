"""What config.json says of a model, parsed by us into one shape; no code of the model is ever run.

How a family reads it is its `Family`; single settings are read in `layer_settings`, `rope_settings`
and `windows`. A setting that would change the model's output and is not implemented is refused,
never ignored.
"""

from __future__ import annotations

from typing import Final

from nanocore.worker.config.family import Family
from nanocore.worker.config.generation_config import read_generation_defaults
from nanocore.worker.config.layer_settings import (
    read_activation,
    read_attention_bias,
    read_heads,
    read_mlp_bias,
    read_moe,
    read_query_divisor,
    read_rope,
    read_softcap,
)
from nanocore.worker.config.model_config import ModelConfig
from nanocore.worker.config.rope_settings import served_lengths
from nanocore.worker.config.settings import Range, Settings
from nanocore.worker.config.windows import read_layer_types

MAX_LAYERS: Final = 1024
"""Eight times what the deepest models have: what is made for each layer stays little."""

_EPS: Final = Range(1e-30, 1)
_MAX_EOS_IDS: Final = 1024


def parse_model_config(
    architecture: str, family: Family, settings: Settings, generation: Settings
) -> ModelConfig:
    """The contents of config.json and generation_config.json, as the family reads them.

    Raises:
        ModelFileError: a setting that is missing, malformed or not implemented.
    """
    if family.translate is not None:
        settings = family.translate(settings)
    _refuse_what_no_family_has(settings)
    num_heads, num_kv_heads, head_dim = read_heads(settings, family)
    num_layers = settings.size("num_hidden_layers", most=MAX_LAYERS)
    vocab_size, hidden_size = settings.size("vocab_size"), settings.size("hidden_size")
    layer_types, sliding_window = read_layer_types(
        settings, family.window, num_layers, family.free_layer_types
    )
    rope = read_rope(settings, family, head_dim)
    max_len = longest = settings.size("max_position_embeddings")
    if rope and not family.rope_by_layer_type:  # Gemma 3's is already stretched
        max_len, longest = served_lengths(rope["full_attention"], longest)
    attention_bias = read_attention_bias(settings, family)
    config = ModelConfig(
        architecture=architecture,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=settings.size("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_model_len=max_len,
        longest_model_len=longest,
        rms_norm_eps=settings.number("rms_norm_eps", family.rms_norm_eps, _EPS),
        tie_word_embeddings=settings.get("tie_word_embeddings", bool, family.tie_word_embeddings),
        dtype=settings.get("dtype", str, settings.get("torch_dtype", str, "")),
        eos_token_ids=_eos_token_ids(settings, generation, family, vocab_size),
        hidden_act=read_activation(settings, family),
        attention_bias=attention_bias,
        o_proj_bias=attention_bias and family.biased_o_proj,
        mlp_bias=read_mlp_bias(settings, family),
        layer_types=layer_types,
        sliding_window=sliding_window,
        query_scale=read_query_divisor(settings, family, head_dim) ** -0.5,
        attn_logit_softcapping=read_softcap(
            settings, "attn_logit_softcapping", family.attn_logit_softcapping
        ),
        final_logit_softcapping=read_softcap(
            settings, "final_logit_softcapping", family.final_logit_softcapping
        ),
        embedding_scale=hidden_size**0.5 if family.scaled_embedding else 1.0,
        rope=rope,
        unrotated_layers=frozenset() if rope else frozenset(range(num_layers)),
        moe=read_moe(settings, family, num_layers),
        qk_norm=family.qk_norm,
        norm_offset=family.norm_offset,
        fits_float16=family.fits_float16,
        generation=read_generation_defaults(generation),
    )
    return config if family.finish is None else family.finish(settings, config)


def _refuse_what_no_family_has(settings: Settings) -> None:
    """Settings of multimodal and bidirectional models."""
    for name in ("text_config", "vision_config"):
        if settings.has(name):
            raise settings.error(name)
    for name in ("use_bidirectional_attention", "is_encoder_decoder"):
        if settings.get(name, bool, False):
            raise settings.error(name)
    if not settings.get("is_causal", bool, True):
        raise settings.error("is_causal")


def _eos_token_ids(
    settings: Settings, generation: Settings, family: Family, vocab_size: int
) -> tuple[int, ...]:
    """generation_config.json's, or else config.json's; the family's default if the model has it.

    An id that the model cannot say is refused, though transformers would serve it: texts would then
    end nowhere, and the files are probably not of one model. Where generation_config.json has ids,
    those of config.json need not be right.
    """
    name = "eos_token_id"
    ids, general = _ids(settings), _ids(generation)
    if general is not None:
        settings, ids = generation, general
    if ids is None:
        default = family.eos_token_id
        if default is None or default >= vocab_size or settings.is_set(name):
            return ()
        return (default,)
    for token_id in ids:
        if not 0 <= token_id < vocab_size:
            raise settings.error(
                name,
                f"has the id {token_id}, which is not in the vocabulary of {vocab_size} tokens "
                "(vocab_size): correct it, or write null if no token ends a text",
            )
    return tuple(dict.fromkeys(ids))


def _ids(settings: Settings) -> list[int] | None:
    """The ids that a file names as ends; None if it names none."""
    name = "eos_token_id"
    if not settings.has(name):
        return None
    if not isinstance(settings.values[name], list):
        return [settings.get(name, int, 0)]
    ids = settings.get(name, list[int], [])
    if len(ids) > _MAX_EOS_IDS:
        raise settings.error(name, f"has {len(ids)} ids, and may have {_MAX_EOS_IDS}")
    return ids
