"""Reader of config.json into one shape for all families; no code of the model is ever run.

How a family reads it is its `Family`; rotations are read in `rope_config`. A setting that would
change the model's output and is not implemented is refused, never ignored.
"""

from __future__ import annotations

from typing import Final

from nanocore.kernels import Activation
from nanocore.protocol.errors import ModelFileError
from nanocore.worker.config.family import Family, Softcap, read_layer_types
from nanocore.worker.config.generation_config import read_generation_defaults
from nanocore.worker.config.json_settings import Range, Settings
from nanocore.worker.config.model_config import ModelConfig, MoeConfig
from nanocore.worker.config.rope_config import (
    LayerType,
    RopeConfig,
    read_rope_by_layer_type,
    read_shared_rope,
    served_lengths,
)

MAX_LAYERS: Final = 1024
"""Eight times what the deepest models have: what is made for each layer stays little."""

_EPS: Final = Range(1e-30, 1)
_MAX_EOS_IDS: Final = 1024


def parse_model_config(
    architecture: str, family: Family, settings: Settings, generation: Settings
) -> ModelConfig:
    """The contents of config.json and generation_config.json, as the family reads them.

    Raises ModelFileError: a setting that is missing, malformed or not implemented.
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
    name = "eos_token_id"
    if not settings.has(name):
        return None
    if not isinstance(settings.values[name], list):
        return [settings.get(name, int, 0)]
    ids = settings.get(name, list[int], [])
    if len(ids) > _MAX_EOS_IDS:
        raise settings.error(name, f"has {len(ids)} ids, and may have {_MAX_EOS_IDS}")
    return ids


MAX_EXPERTS: Final = 2**16
"""Limit for all layers together: twice what the largest models have."""

_ACTIVATIONS: Final[dict[str, Activation]] = {
    "silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu", "gelu_python_tanh": "gelu",
    "gelu_new": "gelu", "gelu_fast": "gelu", "gelu_accurate": "gelu",
}  # fmt: skip
"""By transformers' names. Its other gelus are not the tanh approximation, and not here."""

_SOFTCAP: Final = Range(1e-3, 1e6)


def read_heads(settings: Settings, family: Family) -> tuple[int, int, int]:
    num_heads, hidden_size = settings.size("num_attention_heads"), settings.size("hidden_size")
    if settings.is_set("num_key_value_heads"):
        num_kv_heads = settings.size("num_key_value_heads", num_heads)
    else:
        num_kv_heads = family.num_kv_heads or num_heads
    if num_heads % num_kv_heads:
        raise ModelFileError(
            f"{settings.source}: {num_heads} heads (num_attention_heads) cannot share "
            f"{num_kv_heads} KV heads (num_key_value_heads) evenly"
        )
    default = None if settings.is_set("head_dim") else family.head_dim  # null is no default
    if not settings.has("head_dim") and default is None and hidden_size % num_heads:
        raise settings.error("hidden_size", f"is not divisible by {num_heads} heads")
    head_dim = settings.size("head_dim", default or hidden_size // num_heads)
    return num_heads, num_kv_heads, head_dim


def read_attention_bias(settings: Settings, family: Family) -> bool:
    bias = family.attention_bias
    if family.bias_setting is not None:
        bias = settings.get(family.bias_setting, bool, bias)
    for name in ("attention_bias", "qkv_bias"):
        if settings.get(name, bool, bias) != bias:
            raise settings.error(name, "is not implemented for this architecture")
    return bias


def read_mlp_bias(settings: Settings, family: Family) -> bool:
    bias = settings.get("mlp_bias", bool, False)
    if bias and not family.mlp_bias_setting:
        raise settings.error("mlp_bias", "is not implemented for this architecture")
    return bias


def read_activation(settings: Settings, family: Family) -> Activation:
    name = family.activation_setting
    value = settings.get(name, str, family.activation)
    if value not in _ACTIVATIONS:
        raise settings.error(name, f"is not implemented; known: {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[value]


def read_query_divisor(settings: Settings, family: Family, head_dim: int) -> int:
    if family.query_pre_attn_scalar is None:
        return head_dim
    return settings.size("query_pre_attn_scalar", family.query_pre_attn_scalar)


def read_softcap(settings: Settings, name: str, support: Softcap | None) -> float:
    cap = settings.nullable(name, float, support.default if support else None)
    if cap is None:
        return 0.0
    if support is None:
        raise settings.error(name, "is not implemented for this architecture")
    return settings.within(name, cap, _SOFTCAP)


def read_rope(settings: Settings, family: Family, head_dim: int) -> dict[LayerType, RopeConfig]:
    if family.rope_kinds == ():
        for name in ("rope_parameters", "rope_scaling", "rope_theta"):
            if settings.has(name):
                raise settings.error(name, "is not implemented for this architecture")
        return {}
    if family.rope_by_layer_type:
        ropes = read_rope_by_layer_type(settings, head_dim)
    else:
        rope = read_shared_rope(settings, head_dim, family.rope_theta)
        ropes = {"full_attention": rope, "sliding_attention": rope}
    for rope in ropes.values():
        if family.rope_kinds is not None and rope.kind not in family.rope_kinds:
            raise ModelFileError(
                f"{settings.source}: rope_type = {rope.kind} is not implemented for this "
                "architecture"
            )
        if rope.rotary_dim != head_dim and not family.partial_rotary:
            raise ModelFileError(
                f"{settings.source}: partial_rotary_factor = {rope.rotary_dim / head_dim:g}, and "
                "this architecture is served with 1"
            )
    return ropes


def read_moe(settings: Settings, family: Family, num_layers: int) -> MoeConfig | None:
    if not family.sparse:
        return None
    # transformers 5 writes num_local_experts for Qwen3-MoE where everybody else has num_experts.
    name = "num_local_experts" if settings.has("num_local_experts") else "num_experts"
    num_experts = settings.size(name, most=MAX_EXPERTS // num_layers)
    per_tok = settings.size("num_experts_per_tok")
    if per_tok > num_experts:
        raise settings.error("num_experts_per_tok", f"exceeds {name} = {num_experts}")
    step = settings.size("decoder_sparse_step", 1)
    dense = set(settings.get("mlp_only_layers", list[int], []))
    shared = settings.size("shared_expert_intermediate_size") if family.shared_expert else 0
    return MoeConfig(
        num_experts=num_experts,
        num_experts_per_tok=per_tok,
        intermediate_size=settings.size("moe_intermediate_size"),
        norm_topk_prob=settings.get("norm_topk_prob", bool, False),
        sparse_layers=frozenset(
            i for i in range(num_layers) if (i + 1) % step == 0 and i not in dense
        ),
        shared_intermediate_size=shared,
    )
