"""How the model families read config.json: what each leaves out, adds, and does in its own way.

Defaults and rules are those of transformers' configuration and modelling classes. Everything that
two families treat differently is a field of `Family`; nothing here depends on a model's code.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from nanocore.protocol.errors import ModelFileError
from nanocore.worker.config.rope_settings import LAYER_TYPES, LayerType
from nanocore.worker.config.settings import MAX_SIZE, Range, Settings

WindowRule = Callable[[Settings, int], tuple[int | None, list[bool]]]
"""Settings and number of layers to the window, None for none, and which layers have it."""


@dataclass(frozen=True, slots=True)
class Softcap:
    """A family that can cap logits, and the cap where a file does not say, None for none."""

    default: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """What distinguishes a family.

    First the defaults of settings that a file may leave out; num_kv_heads and head_dim of None
    follow from the other sizes. Then:

    activation_setting: the name under which the MLP's activation stands.
    bias_setting: the name under which biases of Q, K and V are asked for, None if they are no
    choice; attention_bias: its default; biased_o_proj: whether o_proj follows it.
    mlp_bias_setting: whether the MLP's biases are a choice.
    window: which layers attend through a sliding window; free_layer_types: whether `layer_types`
    may say otherwise.
    rope_kinds: kinds of rotary embedding that transformers has for the family, None for all.
    partial_rotary: part of a head may rotate. rope_by_layer_type: see `read_rope_by_layer_type`.
    query_pre_attn_scalar: the default of that setting, None if head_dim stands in for it.
    scaled_embedding: embeddings are multiplied by the root of hidden_size.
    qk_norm: heads of Q and K are normed. norm_offset: what norm weights are stored less.
    fits_float16: activations stay within its range. sparse, shared_expert: mixture of experts, and
    with an expert for every token.
    """

    num_kv_heads: int | None = None
    head_dim: int | None = None
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    eos_token_id: int | None = None
    activation: str = "silu"

    activation_setting: str = "hidden_act"
    bias_setting: str | None = None
    attention_bias: bool = False
    biased_o_proj: bool = False
    mlp_bias_setting: bool = False
    window: WindowRule
    free_layer_types: bool = False
    rope_kinds: tuple[str, ...] | None = None
    partial_rotary: bool = False
    rope_by_layer_type: bool = False
    query_pre_attn_scalar: int | None = None
    attn_logit_softcapping: Softcap | None = None
    final_logit_softcapping: Softcap | None = None
    scaled_embedding: bool = False
    qk_norm: bool = False
    norm_offset: float = 0.0
    fits_float16: bool = True
    sparse: bool = False
    shared_expert: bool = False


def read_layer_types(
    settings: Settings, family: Family, num_layers: int
) -> tuple[tuple[LayerType, ...], int]:
    """Each layer's kind of attention, and the window in tokens; 0 if no layer has one.

    Raises:
        ModelFileError: `layer_types` does not fit the family or the number of layers, or a window
            is needed and not given.
    """
    window, windowed = family.window(settings, num_layers)
    types: list[LayerType] = [LAYER_TYPES[is_windowed] for is_windowed in windowed]
    declared = settings.get("layer_types", list[str], [])
    if declared and declared != types:
        if not family.free_layer_types:
            raise settings.error("layer_types", "is not implemented for this architecture")
        if len(declared) != num_layers:
            raise settings.error("layer_types", f"must have {num_layers} entries, one per layer")
        types = [_layer_type(settings, name) for name in declared]
    if "sliding_attention" not in types:
        return tuple(types), 0
    if window is None:
        raise ModelFileError(
            f"{settings.path}: layers of sliding_attention need a sliding_window"
            + (" and use_sliding_window" if settings.has("use_sliding_window") else "")
        )
    return tuple(types), settings.within("sliding_window", window, Range(1, MAX_SIZE))


def _layer_type(settings: Settings, name: str) -> LayerType:
    for known in LAYER_TYPES:
        if name == known:
            return known
    raise settings.error("layer_types", f"is not implemented; known: {', '.join(LAYER_TYPES)}")


def _no_window(settings: Settings, num_layers: int) -> tuple[int | None, list[bool]]:
    if settings.has("sliding_window"):
        raise settings.error("sliding_window", "is not implemented for this architecture")
    return None, [False] * num_layers


def _window_everywhere(default: int | None) -> WindowRule:
    def rule(settings: Settings, num_layers: int) -> tuple[int | None, list[bool]]:
        window = settings.nullable("sliding_window", int, default)
        return window, [window is not None] * num_layers

    return rule


def _qwen_window(chosen: Callable[[int, int], bool]) -> WindowRule:
    """A window that must be switched on. chosen: of layer index and max_window_layers."""

    def rule(settings: Settings, num_layers: int) -> tuple[int | None, list[bool]]:
        if not settings.get("use_sliding_window", bool, False):
            return None, [False] * num_layers
        window = settings.nullable("sliding_window", int, 4096)
        limit = settings.get("max_window_layers", int, 28)
        settings.within("max_window_layers", limit, Range(0, MAX_SIZE))
        return window, [window is not None and chosen(i, limit) for i in range(num_layers)]

    return rule


def _gemma_window(period: int, period_setting: str | None) -> WindowRule:
    """All layers but every period-th."""

    def rule(settings: Settings, num_layers: int) -> tuple[int | None, list[bool]]:
        window = settings.nullable("sliding_window", int, 4096)
        every = settings.size(period_setting, period) if period_setting else period
        return window, [(i + 1) % every != 0 for i in range(num_layers)]

    return rule


_LLAMA = Family(
    eos_token_id=2, bias_setting="attention_bias", biased_o_proj=True, mlp_bias_setting=True,
    window=_no_window,
)  # fmt: skip
_MISTRAL = Family(num_kv_heads=8, eos_token_id=2, window=_window_everywhere(4096))
_PHI3 = Family(
    rms_norm_eps=1e-5, eos_token_id=32000, window=_window_everywhere(None),
    rope_kinds=("default",), partial_rotary=True,
)  # fmt: skip
_QWEN2 = Family(
    num_kv_heads=32, attention_bias=True,
    window=_qwen_window(lambda i, limit: i >= limit), free_layer_types=True,
)  # fmt: skip
_QWEN2_MOE = Family(
    num_kv_heads=16, bias_setting="qkv_bias", attention_bias=True,
    window=_qwen_window(lambda i, limit: i % 2 == 0 and i < limit), free_layer_types=True,
    sparse=True, shared_expert=True,
)  # fmt: skip
_QWEN3 = Family(
    num_kv_heads=32, head_dim=128, bias_setting="attention_bias", biased_o_proj=True,
    window=_qwen_window(lambda i, limit: i >= limit), free_layer_types=True, qk_norm=True,
)  # fmt: skip
_QWEN3_MOE = Family(
    num_kv_heads=4, bias_setting="attention_bias", biased_o_proj=True,
    window=_qwen_window(lambda _i, _limit: True), qk_norm=True, sparse=True,
)  # fmt: skip
_GEMMA2 = Family(
    num_kv_heads=4, head_dim=256, tie_word_embeddings=True, eos_token_id=1,
    activation="gelu_pytorch_tanh", activation_setting="hidden_activation",
    bias_setting="attention_bias", biased_o_proj=True,
    window=_gemma_window(2, None), free_layer_types=True, query_pre_attn_scalar=256,
    attn_logit_softcapping=Softcap(50.0), final_logit_softcapping=Softcap(30.0),
    scaled_embedding=True, norm_offset=1.0, fits_float16=False,
)  # fmt: skip
_GEMMA3 = Family(
    num_kv_heads=4, head_dim=256, tie_word_embeddings=True, eos_token_id=1,
    activation="gelu_pytorch_tanh", activation_setting="hidden_activation",
    bias_setting="attention_bias", biased_o_proj=True,
    window=_gemma_window(6, "sliding_window_pattern"), free_layer_types=True,
    rope_by_layer_type=True, query_pre_attn_scalar=256,
    final_logit_softcapping=Softcap(None),  # transformers' Gemma 3 does not cap attention
    scaled_embedding=True, qk_norm=True, norm_offset=1.0, fits_float16=False,
)  # fmt: skip

FAMILIES: dict[str, Family] = {
    "Qwen3ForCausalLM": _QWEN3,
    "Qwen2ForCausalLM": _QWEN2,
    "Qwen3MoeForCausalLM": _QWEN3_MOE,
    "Qwen2MoeForCausalLM": _QWEN2_MOE,
    "LlamaForCausalLM": _LLAMA,
    "MistralForCausalLM": _MISTRAL,
    "Gemma2ForCausalLM": _GEMMA2,
    "Gemma3ForCausalLM": _GEMMA3,
    "Phi3ForCausalLM": _PHI3,
}
"""By the names that stand in config.json's `architectures`."""
