"""Rotary position embeddings (RoPE: Su et al. 2021): `RopeConfig`, and the readers of its schemas.

Old: `rope_scaling` beside `rope_theta`. New: `rope_parameters`. Which of two spellings wins, and
what is assumed where nothing is said, follows transformers. An unknown key is refused.
"""

from __future__ import annotations

from typing import Literal, get_args

import msgspec

from nanocore.worker.config.json_settings import MAX_SIZE, Range, Settings

RopeKind = Literal["default", "linear", "ntk", "dynamic", "yarn", "longrope", "llama3"]


class RopeConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Parameters that turn positions into angles.

    rotary_dim: how many of a head's leading values rotate; even.
    theta: the base of the frequencies.
    factor: how far the context is stretched.
    original_max_position_embeddings: the length before stretching.
    low_freq_factor, high_freq_factor: llama3's band, in rotations over the original length.
    beta_fast, beta_slow: YaRN's band, likewise; truncate: widen it to whole dimensions.
    short_factor, long_factor: LongRoPE's, how far each pair of values is stretched, by whether no
    more than the original length is served.
    attention_factor, mscale, mscale_all_dim: the scale of cos and sin of YaRN and LongRoPE, or what
    it follows from; None and 0 are absent.
    """

    kind: RopeKind = "default"
    rotary_dim: int
    theta: float
    factor: float = 1.0
    original_max_position_embeddings: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()
    attention_factor: float | None = None
    mscale: float = 0.0
    mscale_all_dim: float = 0.0


LayerType = Literal["full_attention", "sliding_attention"]
LAYER_TYPES: tuple[LayerType, ...] = get_args(LayerType)
Ropes = dict[LayerType, RopeConfig]
"""Rotations of both kinds of layers, whether or not a model has them; none if nothing rotates."""

_KINDS: tuple[RopeKind, ...] = get_args(RopeKind)
_KNOWN = {
    *RopeConfig.__struct_fields__, "rope_type", "type", "rope_theta", "partial_rotary_factor",
    "finetuned",  # a remark, in some YaRN models
} - {"kind", "rotary_dim", "theta"}  # fmt: skip

_OTHER_NAMES: dict[str, RopeKind] = {"su": "longrope"}  # of the first Phi-3 files

# Far wider than any model, and narrow enough for the formulas to stay finite in float32.
THETA = Range(1, 1e15, exceeds_low=True)
_FACTOR = Range(1, 1e6)
_STRETCH = Range(1e-3, 1e6)
_BAND = Range(1e-3, 1e6)
_ORIGINAL = Range(2, MAX_SIZE)  # its logarithm divides
_MSCALE = Range(0, 1e3)
_ATTENTION_FACTOR = Range(1e-3, 1e3)
_PART = Range(0, 1, exceeds_low=True)


def read_rope(settings: Settings, head_dim: int, theta: float = 10_000.0) -> Ropes:
    """One rotation for all layers. theta: where none is given.

    Raises ModelFileError: a kind or key that is unknown, or a value that cannot work.
    """
    name = "rope_scaling" if settings.section("rope_scaling").values else "rope_parameters"
    theta = settings.number("rope_theta", theta, THETA)
    rope = read_rotation(settings, settings.section(name), head_dim, theta)
    return {"full_attention": rope, "sliding_attention": rope}


def served_lengths(rope: RopeConfig | None, max_position_embeddings: int) -> tuple[int, int]:
    """Numbers of positions that a model serves by default, and at most.

    vLLM's rules. Where more positions bend all of them, only the original ones are served unasked.
    """
    longest = max_position_embeddings  # longrope's and llama3's is already stretched
    if rope is None:
        return longest, longest
    if rope.kind in ("linear", "ntk", "dynamic"):
        longest = int(max_position_embeddings * rope.factor)
    if rope.kind == "yarn":
        longest = int(rope.original_max_position_embeddings * rope.factor)
    longest = min(longest, MAX_SIZE)
    if rope.kind in ("dynamic", "longrope"):
        return min(rope.original_max_position_embeddings, longest), longest
    return longest, longest


def read_rotation(settings: Settings, rope: Settings, head_dim: int, theta: float) -> RopeConfig:
    """One rotation, as the object `rope` of config.json has it. Raises: see `read_rope`."""
    for key in rope.values:
        if key not in _KNOWN:
            raise rope.error(key, "is an unknown rotary setting")
    kind = _kind(rope)
    partial = settings.number("partial_rotary_factor", 1.0, _PART)
    original_length = _original_length(settings, rope, kind)
    factor = 1.0
    if kind == "longrope":
        factor = max(1.0, settings.size("max_position_embeddings") / original_length)
    config = RopeConfig(
        kind=kind,
        rotary_dim=int(head_dim * rope.number("partial_rotary_factor", partial, _PART)),
        theta=rope.number("rope_theta", theta, THETA),
        factor=rope.number("factor", factor, _FACTOR),
        original_max_position_embeddings=original_length,
        low_freq_factor=rope.number("low_freq_factor", 1.0, _BAND),
        high_freq_factor=rope.number("high_freq_factor", 1.0, _BAND),
        beta_fast=rope.within("beta_fast", rope.get("beta_fast", float, 0.0) or 32.0, _BAND),
        beta_slow=rope.within("beta_slow", rope.get("beta_slow", float, 0.0) or 1.0, _BAND),
        truncate=rope.get("truncate", bool, True),
        short_factor=tuple(rope.get("short_factor", list[float], [])),
        long_factor=tuple(rope.get("long_factor", list[float], [])),
        attention_factor=rope.nullable_number("attention_factor", None, _ATTENTION_FACTOR),
        mscale=rope.number("mscale", 0.0, _MSCALE),
        mscale_all_dim=rope.number("mscale_all_dim", 0.0, _MSCALE),
    )
    _check(settings, rope, config, head_dim)
    return config


def _kind(rope: Settings) -> RopeKind:
    name = "rope_type" if rope.has("rope_type") else "type"
    value = rope.get(name, str, "default")
    value = _OTHER_NAMES.get(value, value)
    for kind in _KINDS:
        if kind == value:
            return kind
    raise rope.error(name, f"is not implemented; known: {', '.join(_KINDS)}")


def _original_length(settings: Settings, rope: Settings, kind: RopeKind) -> int:
    # A length at the top of the file comes first, as in transformers.
    length = settings.size("max_position_embeddings")
    if kind not in ("yarn", "longrope", "llama3"):
        return length
    length = rope.size("original_max_position_embeddings", length)
    return settings.size("original_max_position_embeddings", length)


def _check(settings: Settings, rope: Settings, config: RopeConfig, head_dim: int) -> None:
    least = 4 if config.kind == "dynamic" else 2
    if config.rotary_dim % 2 or not least <= config.rotary_dim <= head_dim:
        part = rope if rope.has("partial_rotary_factor") else settings
        raise part.error(
            "partial_rotary_factor",
            f"makes {config.rotary_dim} of head_dim = {head_dim} rotate: an even number is needed, "
            f"from {least} to head_dim",
        )
    if config.kind not in ("default", "longrope") and not rope.has("factor"):
        raise rope.error("factor", f"is needed by rope_type {config.kind}")
    if config.kind == "longrope":
        rope.within(
            "original_max_position_embeddings", config.original_max_position_embeddings, _ORIGINAL
        )
        _check_factors(rope, "short_factor", config.short_factor, config.rotary_dim)
        _check_factors(rope, "long_factor", config.long_factor, config.rotary_dim)
    if config.kind == "llama3":
        if not config.low_freq_factor < config.high_freq_factor:
            raise rope.error("high_freq_factor", "must exceed low_freq_factor")


def _check_factors(rope: Settings, name: str, factors: tuple[float, ...], rotary_dim: int) -> None:
    if not rope.has(name):
        raise rope.error(name, "is needed by rope_type longrope")
    if len(factors) != rotary_dim // 2:
        raise rope.error(
            name,
            f"has {len(factors)} numbers; {rotary_dim // 2} are needed, one for each pair of the "
            f"{rotary_dim} values of a head that rotate",
        )
    for factor in factors:
        rope.within(name, factor, _STRETCH)
