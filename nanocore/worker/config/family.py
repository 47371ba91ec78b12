"""How a model family reads config.json: its defaults, rules and windows.

Defaults and rules are those of transformers' configuration and modelling classes. Everything that
two families treat differently is a field of `Family`; each family says its own beside its layers,
in `nanocore.worker.models`. Rules about windows are made by the functions here; `layer_types` may
say otherwise.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from nanocore.protocol.errors import ModelFileError
from nanocore.worker.config.json_settings import MAX_SIZE, Range, Settings
from nanocore.worker.config.model_config import ModelConfig
from nanocore.worker.config.rope_config import LAYER_TYPES, LayerType

WindowRule = Callable[[Settings, int], tuple[int | None, list[bool]]]
"""Settings and number of layers to the window, None for none, and which layers have it."""


def no_window(settings: Settings, num_layers: int) -> tuple[int | None, list[bool]]:
    """No layer has one, and a file that asks for it is refused."""
    if settings.has("sliding_window"):
        raise settings.error("sliding_window", "is not implemented for this architecture")
    return None, [False] * num_layers


def window_everywhere(default: int | None) -> WindowRule:
    """Every layer has it, unless it is null. default: in tokens, where the file says nothing."""

    def rule(settings: Settings, num_layers: int) -> tuple[int | None, list[bool]]:
        window = settings.nullable("sliding_window", int, default)
        return window, [window is not None] * num_layers

    return rule


def window_if_asked(chosen: Callable[[int, int], bool]) -> WindowRule:
    """A window that must be switched on. chosen: of layer index and max_window_layers."""

    def rule(settings: Settings, num_layers: int) -> tuple[int | None, list[bool]]:
        if not settings.get("use_sliding_window", bool, False):
            return None, [False] * num_layers
        window = settings.nullable("sliding_window", int, 4096)
        limit = settings.get("max_window_layers", int, 28)
        settings.within("max_window_layers", limit, Range(0, MAX_SIZE))
        return window, [window is not None and chosen(i, limit) for i in range(num_layers)]

    return rule


def window_with_gaps(period: int, period_setting: str | None) -> WindowRule:

    def rule(settings: Settings, num_layers: int) -> tuple[int | None, list[bool]]:
        window = settings.nullable("sliding_window", int, 4096)
        every = settings.size(period_setting, period) if period_setting else period
        return window, [(i + 1) % every != 0 for i in range(num_layers)]

    return rule


def read_layer_types(
    settings: Settings, rule: WindowRule, num_layers: int, free_layer_types: bool
) -> tuple[tuple[LayerType, ...], int]:
    """Each layer's kind of attention, and the window in tokens; 0 if no layer has one.

    Raises:
        ModelFileError: `layer_types` does not fit the family or the number of layers, or a window
            is needed and not given.
    """
    window, windowed = rule(settings, num_layers)
    types: list[LayerType] = [LAYER_TYPES[is_windowed] for is_windowed in windowed]
    declared = settings.get("layer_types", list[str], [])
    if declared and declared != types:
        if not free_layer_types:
            raise settings.error("layer_types", "is not implemented for this architecture")
        if len(declared) != num_layers:
            raise settings.error("layer_types", f"must have {num_layers} entries, one per layer")
        types = [_layer_type(settings, name) for name in declared]
    if "sliding_attention" not in types:
        return tuple(types), 0
    if window is None:
        raise ModelFileError(
            f"{settings.source}: layers of sliding_attention need a sliding_window"
            + (" and use_sliding_window" if settings.has("use_sliding_window") else "")
        )
    return tuple(types), settings.within("sliding_window", window, Range(1, MAX_SIZE))


def _layer_type(settings: Settings, name: str) -> LayerType:
    for known in LAYER_TYPES:
        if name == known:
            return known
    raise settings.error("layer_types", f"is not implemented; known: {', '.join(LAYER_TYPES)}")


class Softcap(msgspec.Struct, frozen=True):
    """A family that can cap logits, and the cap where a file does not say, None for none."""

    default: float | None


class Family(msgspec.Struct, frozen=True, kw_only=True):
    """Rules and defaults of one model family.

    First the defaults of settings that a file may leave out; num_kv_heads and head_dim of None
    follow from the other sizes. Then:

    activation_setting: the name under which the MLP's activation stands.
    bias_setting: the name under which biases of Q, K and V are asked for, None if they are no
    choice; attention_bias: its default; biased_o_proj: whether o_proj follows it.
    mlp_bias_setting: whether the MLP's biases are a choice.
    window: which layers attend through a sliding window; free_layer_types: whether `layer_types`
    may say otherwise.
    rope_kinds: kinds of rotary embedding that transformers has for the family, None for all; empty
    if nothing rotates.
    partial_rotary: part of a head may rotate. rope_by_layer_type: see `read_rope_by_layer_type`.
    query_pre_attn_scalar: the default of that setting, None if head_dim stands in for it.
    scaled_embedding: embeddings are multiplied by the root of hidden_size.
    qk_norm: heads of Q and K are normed. norm_offset: what norm weights are stored less.
    fits_float16: activations stay within its range. sparse, shared_expert: mixture of experts, and
    with an expert for every token.

    What no field says, a function does. translate: from config.json to the names that other
    families have for its settings. finish: from config.json and what all families read of it to
    what this one adds; it may raise ModelFileError.
    """

    num_kv_heads: int | None = None
    head_dim: int | None = None
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10_000.0
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

    translate: Callable[[Settings], Settings] | None = None
    finish: Callable[[Settings, ModelConfig], ModelConfig] | None = None
