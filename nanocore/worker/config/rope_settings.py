"""The rotary settings of config.json, in every schema that exists, as `RopeConfig`s.

Old: `rope_scaling` beside `rope_theta` (and Gemma 3's `rope_local_base_freq`). New:
`rope_parameters`, for Gemma 3 one object per layer type. Which of two spellings wins, and what is
assumed where nothing is said, follows transformers. A key that nobody knows is refused.
"""

from __future__ import annotations

from typing import Literal, get_args

from nanocore.worker.config.settings import Settings
from nanocore.worker.rope import RopeConfig, RopeKind

LayerType = Literal["full_attention", "sliding_attention"]
LAYER_TYPES: tuple[LayerType, ...] = get_args(LayerType)

_KINDS: tuple[RopeKind, ...] = get_args(RopeKind)
_KNOWN = {
    "rope_type", "type", "rope_theta", "partial_rotary_factor", "factor",
    "original_max_position_embeddings", "low_freq_factor", "high_freq_factor", "beta_fast",
    "beta_slow", "truncate", "attention_factor", "mscale", "mscale_all_dim",
    "finetuned",  # a remark, in some YaRN models
}  # fmt: skip


def read_shared_rope(settings: Settings, head_dim: int, theta: float = 10_000.0) -> RopeConfig:
    """The rotation that all layers share. theta: where none is given.

    Raises:
        ModelFileError: a kind or key that is unknown, or a value that cannot work.
    """
    name = "rope_scaling" if settings.values.get("rope_scaling") else "rope_parameters"
    theta = settings.get("rope_theta", float, theta)
    return _read(settings, settings.section(name), head_dim, theta)


def read_rope_by_layer_type(settings: Settings, head_dim: int) -> dict[LayerType, RopeConfig]:
    """Gemma 3's two rotations: a long one for full attention, a short one for the window.

    Raises:
        ModelFileError: as `read_shared_rope`, or a schema that does not tell them apart.
    """
    nested = settings.section("rope_parameters")
    for key in nested.values:
        if key not in LAYER_TYPES:
            raise nested.error(key, f"is not one of Gemma 3's layer types: {LAYER_TYPES}")
    full = nested.section("full_attention")
    old = settings.section("rope_scaling")
    if old.values:
        full = Settings(settings.path, full.values | old.values, old.name)
    full_theta = settings.get("rope_theta", float, 1_000_000.0)
    local_theta = settings.get("rope_local_base_freq", float, 10_000.0)
    local = nested.section("sliding_attention")
    return {
        "full_attention": _read(settings, full, head_dim, full_theta),
        "sliding_attention": _read(settings, local, head_dim, local_theta),
    }


def scaled_length(rope: RopeConfig, max_position_embeddings: int) -> int:
    """How many positions a model serves: vLLM's rule for each kind of stretching."""
    if rope.kind in ("linear", "dynamic"):
        return int(max_position_embeddings * rope.factor)
    if rope.kind == "yarn":
        return int(rope.original_max_position_embeddings * rope.factor)
    return max_position_embeddings  # llama3's is already stretched


def _read(settings: Settings, rope: Settings, head_dim: int, theta: float) -> RopeConfig:
    """One object of rotary settings, with what stands beside it at the top."""
    for key in rope.values:
        if key not in _KNOWN:
            raise rope.error(key, "is an unknown rotary setting")
    kind = _kind(rope)
    partial = settings.get("partial_rotary_factor", float, 1.0)
    config = RopeConfig(
        kind=kind,
        rotary_dim=int(head_dim * rope.get("partial_rotary_factor", float, partial)),
        theta=rope.get("rope_theta", float, theta),
        factor=rope.get("factor", float, 1.0),
        original_max_position_embeddings=_original_length(settings, rope, kind),
        low_freq_factor=rope.get("low_freq_factor", float, 1.0),
        high_freq_factor=rope.get("high_freq_factor", float, 1.0),
        beta_fast=rope.get("beta_fast", float, 0.0) or 32.0,
        beta_slow=rope.get("beta_slow", float, 0.0) or 1.0,
        truncate=rope.get("truncate", bool, True),
        attention_factor=rope.nullable("attention_factor", float, None),
        mscale=rope.get("mscale", float, 0.0),
        mscale_all_dim=rope.get("mscale_all_dim", float, 0.0),
    )
    _check(settings, rope, config, head_dim)
    return config


def _kind(rope: Settings) -> RopeKind:
    name = "rope_type" if rope.has("rope_type") else "type"
    value = rope.get(name, str, "default")
    for kind in _KINDS:
        if kind == value:
            return kind
    raise rope.error(name, f"is not implemented; known: {', '.join(_KINDS)}")


def _original_length(settings: Settings, rope: Settings, kind: RopeKind) -> int:
    """The length before stretching; one at the top of the file comes first, as in transformers."""
    length = settings.size("max_position_embeddings")
    if kind not in ("yarn", "llama3"):
        return length
    length = rope.size("original_max_position_embeddings", length)
    return settings.size("original_max_position_embeddings", length)


def _check(settings: Settings, rope: Settings, config: RopeConfig, head_dim: int) -> None:
    """Refuse what the formulas cannot be applied to."""
    least = 4 if config.kind == "dynamic" else 2
    if config.rotary_dim % 2 or not least <= config.rotary_dim <= head_dim:
        part = settings if settings.has("partial_rotary_factor") else rope
        raise part.error(
            "partial_rotary_factor",
            f"makes {config.rotary_dim} of head_dim = {head_dim} rotate: an even number is needed, "
            f"from {least} to head_dim",
        )
    if config.theta <= 1.0:
        raise (rope if rope.has("rope_theta") else settings).error("rope_theta", "must exceed 1")
    if config.kind != "default" and not config.factor >= 1.0:
        raise rope.error("factor", "must be at least 1")
    if config.kind != "default" and not rope.has("factor"):
        raise rope.error("factor", f"is needed by rope_type {config.kind}")
    if config.kind == "llama3":
        if not 0.0 < config.low_freq_factor < config.high_freq_factor:
            raise rope.error("high_freq_factor", "must exceed low_freq_factor, which exceeds 0")
    if config.kind == "yarn" and min(config.beta_fast, config.beta_slow) <= 0.0:
        raise rope.error("beta_slow", "and beta_fast must exceed 0")
