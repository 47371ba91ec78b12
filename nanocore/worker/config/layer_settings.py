"""The settings that describe a model's layers, each read as its family reads it.

A family that does not have a setting refuses values of it that would ask for something.
"""

from __future__ import annotations

from typing import Final

from nanocore.kernels.activation import Activation
from nanocore.protocol.errors import ModelFileError
from nanocore.worker.config.family import Family, Softcap
from nanocore.worker.config.model_config import MoeConfig
from nanocore.worker.config.rope_config import RopeConfig
from nanocore.worker.config.rope_settings import (
    LayerType,
    read_rope_by_layer_type,
    read_shared_rope,
)
from nanocore.worker.config.settings import Range, Settings

MAX_EXPERTS: Final = 2**16
"""Of all layers together; twice what the largest models have."""

_ACTIVATIONS: Final[dict[str, Activation]] = {
    "silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu", "gelu_python_tanh": "gelu",
    "gelu_new": "gelu", "gelu_fast": "gelu", "gelu_accurate": "gelu",
}  # fmt: skip
"""By transformers' names. Its other gelus are not the tanh approximation, and not here."""

_SOFTCAP: Final = Range(1e-3, 1e6)


def read_heads(settings: Settings, family: Family) -> tuple[int, int, int]:
    """The numbers of query heads and of KV heads, and their size."""
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
    """Whether Q, K and V have biases."""
    bias = family.attention_bias
    if family.bias_setting is not None:
        bias = settings.get(family.bias_setting, bool, bias)
    for name in ("attention_bias", "qkv_bias"):
        if settings.get(name, bool, bias) != bias:
            raise settings.error(name, "is not implemented for this architecture")
    return bias


def read_mlp_bias(settings: Settings, family: Family) -> bool:
    """Whether the MLP's projections have biases."""
    bias = settings.get("mlp_bias", bool, False)
    if bias and not family.mlp_bias_setting:
        raise settings.error("mlp_bias", "is not implemented for this architecture")
    return bias


def read_activation(settings: Settings, family: Family) -> Activation:
    """What the gates of MLPs and of experts pass through."""
    name = family.activation_setting
    value = settings.get(name, str, family.activation)
    if value not in _ACTIVATIONS:
        raise settings.error(name, f"is not implemented; known: {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[value]


def read_query_divisor(settings: Settings, family: Family, head_dim: int) -> int:
    """The number whose root divides the products of queries and keys."""
    if family.query_pre_attn_scalar is None:
        return head_dim
    return settings.size("query_pre_attn_scalar", family.query_pre_attn_scalar)


def read_softcap(settings: Settings, name: str, support: Softcap | None) -> float:
    """A cap, 0 for none."""
    cap = settings.nullable(name, float, support.default if support else None)
    if cap is None:
        return 0.0
    if support is None:
        raise settings.error(name, "is not implemented for this architecture")
    return settings.within(name, cap, _SOFTCAP)


def read_rope(settings: Settings, family: Family, head_dim: int) -> dict[LayerType, RopeConfig]:
    """The rotations of both layer types; empty for a family without."""
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
                f"{settings.source}: a partial_rotary_factor other than 1 is not implemented for "
                "this architecture"
            )
    return ropes


def read_moe(settings: Settings, family: Family, num_layers: int) -> MoeConfig | None:
    """The experts, and which layers have them; None for a family without."""
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
