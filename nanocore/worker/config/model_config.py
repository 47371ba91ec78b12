"""What config.json says of a model, parsed by us into one shape; no code of the model is ever run.

How the families differ in reading it stands in `families`; single settings are read in
`layer_settings` and `rope_settings`. A setting that would change the model's output and is not
implemented is refused, never ignored.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from nanocore.protocol.errors import ModelFileError
from nanocore.worker.config.families import FAMILIES, Family, read_layer_types
from nanocore.worker.config.generation_config import GenerationDefaults, read_generation_defaults
from nanocore.worker.config.layer_settings import (
    Activation,
    MoeConfig,
    read_activation,
    read_attention_bias,
    read_heads,
    read_mlp_bias,
    read_moe,
    read_query_divisor,
    read_rope,
    read_softcap,
)
from nanocore.worker.config.rope_settings import LayerType, scaled_length
from nanocore.worker.config.settings import Settings
from nanocore.worker.rope import RopeConfig

ARCHITECTURES = tuple(FAMILIES)
"""What `models.build_model` builds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A decoder-only transformer.

    max_model_len: positions that the model serves, stretched ones included.
    dtype: the checkpoint's, as torch spells it.
    eos_token_ids: of generation_config.json, or else of config.json.
    attention_bias: of Q, K and V. mlp_bias: of all three projections.
    layer_types: one per layer. sliding_window: how many tokens a layer of sliding_attention sees,
    the current one included; 0 if there is no such layer.
    query_scale: what the products of queries and keys are multiplied by.
    attn_logit_softcapping, final_logit_softcapping: logits become cap * tanh(logits / cap); 0 is
    off.
    embedding_scale: what embeddings are multiplied by, once rounded to the model's dtype.
    rope: for both layer types, whether or not a layer has them. moe: None if all layers are dense.
    qk_norm: heads of Q and K are normed. norm_offset: what norm weights are stored less.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_model_len: int
    rms_norm_eps: float
    tie_word_embeddings: bool
    dtype: str
    eos_token_ids: tuple[int, ...]
    hidden_act: Activation
    attention_bias: bool
    o_proj_bias: bool
    mlp_bias: bool
    layer_types: tuple[LayerType, ...]
    sliding_window: int
    query_scale: float
    attn_logit_softcapping: float
    final_logit_softcapping: float
    embedding_scale: float
    rope: dict[LayerType, RopeConfig]
    moe: MoeConfig | None
    qk_norm: bool
    norm_offset: float
    generation: GenerationDefaults


def load_model_config(folder: Path) -> ModelConfig:
    """Read config.json and generation_config.json of a Hugging Face folder.

    Raises:
        ModelFileError: a missing or malformed file, an unknown architecture, or a setting that is
            not implemented.
    """
    if not folder.is_dir():
        raise ModelFileError(
            f"model {str(folder)!r} is not a folder: give the path of a folder in Hugging Face "
            "format (config.json, *.safetensors, tokenizer.json)"
        )
    settings = Settings.read(folder / "config.json")
    architecture = _architecture(settings)
    if architecture not in ARCHITECTURES:
        raise ModelFileError(
            f"{settings.path}: architecture {architecture!r} is unknown; "
            f"known: {', '.join(ARCHITECTURES)}"
        )
    path = folder / "generation_config.json"
    generation = Settings.read(path) if path.exists() else Settings(path, {})
    return parse_model_config(settings, generation)


def parse_model_config(settings: Settings, generation: Settings) -> ModelConfig:
    """The contents of config.json and generation_config.json, of any family in `FAMILIES`.

    Raises:
        ModelFileError: a setting that is missing, malformed or not implemented.
    """
    architecture = _architecture(settings)
    family = FAMILIES[architecture]
    _refuse_what_no_family_has(settings)
    num_heads, num_kv_heads, head_dim = read_heads(settings, family)
    num_layers, hidden_size = settings.size("num_hidden_layers"), settings.size("hidden_size")
    layer_types, sliding_window = read_layer_types(settings, family, num_layers)
    rope = read_rope(settings, family, head_dim)
    max_len = settings.size("max_position_embeddings")
    if not family.rope_by_layer_type:  # Gemma 3's is already stretched
        max_len = scaled_length(rope["full_attention"], max_len)
    attention_bias = read_attention_bias(settings, family)
    return ModelConfig(
        architecture=architecture,
        vocab_size=settings.size("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=settings.size("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_model_len=max_len,
        rms_norm_eps=settings.get("rms_norm_eps", float, family.rms_norm_eps),
        tie_word_embeddings=settings.get("tie_word_embeddings", bool, family.tie_word_embeddings),
        dtype=settings.get("dtype", str, settings.get("torch_dtype", str, "float32")),
        eos_token_ids=_eos_token_ids(settings, generation, family),
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
        moe=read_moe(settings, family, num_layers),
        qk_norm=family.qk_norm,
        norm_offset=family.norm_offset,
        generation=read_generation_defaults(generation),
    )


def _architecture(settings: Settings) -> str:
    names = settings.get("architectures", list[str], [])
    return names[0] if names else "none"


def _refuse_what_no_family_has(settings: Settings) -> None:
    """Settings of quantized, multimodal and bidirectional models."""
    for name in ("quantization_config", "compression_config", "text_config", "vision_config"):
        if settings.has(name):
            raise settings.error(name)
    for name in ("use_bidirectional_attention", "is_encoder_decoder"):
        if settings.get(name, bool, False):
            raise settings.error(name)


def _eos_token_ids(settings: Settings, generation: Settings, family: Family) -> tuple[int, ...]:
    """generation_config.json's, or else config.json's."""
    if generation.has("eos_token_id"):
        return _ids(generation)
    if "eos_token_id" not in settings.values:
        return () if family.eos_token_id is None else (family.eos_token_id,)
    return _ids(settings) if settings.has("eos_token_id") else ()


def _ids(settings: Settings) -> tuple[int, ...]:
    if isinstance(settings.values["eos_token_id"], list):
        return tuple(settings.get("eos_token_id", list[int], []))
    return (settings.get("eos_token_id", int, 0),)
