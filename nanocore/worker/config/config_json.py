"""Reader of what families share in config.json; each family puts its configuration together.

Defaults and rules are those of transformers' configuration and modelling classes. A setting that
would change the model's output and is not implemented is refused, never ignored. No code of a model
is ever run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import msgspec
from msgspec.structs import replace

from nanocore.kernels import Activation
from nanocore.protocol.errors import ModelFileError
from nanocore.worker.config.generation_config import read_generation_defaults
from nanocore.worker.config.json_settings import MAX_SIZE, Range, Settings
from nanocore.worker.config.model_config import AttentionConfig, MLPConfig, ModelConfig, MoeConfig
from nanocore.worker.config.rope_config import (
    LAYER_TYPES,
    LayerType,
    Ropes,
    read_rope,
    served_lengths,
)

MAX_LAYERS: Final = 1024
"""Eight times what the deepest models have: what is made for each layer stays little."""
MAX_EXPERTS: Final = 2**16
"""Limit for all layers together: twice what the largest models have."""

_NOT_HERE: Final = "is not implemented for this architecture"
_EPS: Final = Range(1e-30, 1)
_SOFTCAP: Final = Range(1e-3, 1e6)
_MAX_EOS_IDS: Final = 1024
_OF_SOME_FAMILIES: Final[dict[str, type]] = {
    "attn_logit_softcapping": float, "final_logit_softcapping": float, "mlp_bias": bool,
}  # fmt: skip
"""Settings that are refused where the family has not read them; null and false ask for nothing."""

_ACTIVATIONS: Final[dict[str, Activation]] = {
    "silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu", "gelu_python_tanh": "gelu",
    "gelu_new": "gelu", "gelu_fast": "gelu", "gelu_accurate": "gelu",
}  # fmt: skip
"""By transformers' names. Its other gelus are not the tanh approximation, and not here."""

Windows = tuple[int | None, Callable[[int], bool]]
"""The window in tokens, None for none, and whether a layer has it."""


class ConfigReader(msgspec.Struct, frozen=True):
    """Files of a model, and readers of what families share; what is absent there has defaults.

    settings: config.json's, see `DecoderModel.translate`. generation: generation_config.json's.
    is_gguf: both are made of a GGUF file's settings.

    Every method raises ModelFileError: a setting is missing, malformed or not implemented.
    """

    architecture: str
    settings: Settings
    generation: Settings
    is_gguf: bool = False

    @property
    def num_layers(self) -> int:
        return self.settings.size("num_hidden_layers", most=MAX_LAYERS)

    def flag(self, name: str, default: bool = False) -> bool:
        return self.settings.get(name, bool, default)

    def softcap(self, name: str, default: float | None) -> float:
        """A cap of logits; 0 for none, which null stands for."""
        return self.settings.nullable_number(name, default, _SOFTCAP) or 0.0

    def windows(self, default: int | None) -> Windows:
        """A window in every layer, unless it is null."""
        window = self.settings.nullable("sliding_window", int, default)
        return window, lambda _layer: window is not None

    def attention(
        self,
        *,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        bias: bool = False,
        o_proj_bias: bool | None = None,
        scale: float | None = None,
        windows: Windows | None = None,
        free_layer_types: bool = False,
        rope: Callable[[Settings, int], Ropes] = read_rope,
        partial_rope: bool = False,
        **own: Any,
    ) -> AttentionConfig:
        """Read what `Attention` takes.

        Args:
            num_kv_heads, head_dim: defaults; None follows from the other sizes.
            bias: files that say otherwise are refused. o_proj_bias, scale: None follows from bias
                and from head_dim.
            windows: None for none. free_layer_types: `layer_types` may say otherwise.
            rope: reads settings, given head_dim. partial_rope: part of a head may rotate.
            own: see `AttentionConfig`.
        """
        settings = self.settings
        num_heads, num_kv_heads, head_dim = self._heads(num_kv_heads, head_dim)
        for name in ("attention_bias", "qkv_bias"):
            if self.flag(name, bias) != bias:
                raise settings.error(name, _NOT_HERE)
        if windows is None:
            windows = None, lambda _layer: False
            if settings.has("sliding_window"):
                raise settings.error("sliding_window", _NOT_HERE)
        layer_types, sliding_window = self._layer_types(*windows, free_layer_types)
        ropes = rope(settings, head_dim)
        for rotary_dim in (rope.rotary_dim for rope in ropes.values()):
            if rotary_dim != head_dim and not partial_rope:
                raise ModelFileError(
                    f"{settings.source}: partial_rotary_factor = {rotary_dim / head_dim:g}, and "
                    "this architecture is served with 1"
                )
        return AttentionConfig(
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            bias=bias,
            o_proj_bias=bias if o_proj_bias is None else o_proj_bias,
            scale=head_dim**-0.5 if scale is None else scale,
            layer_types=layer_types,
            sliding_window=sliding_window,
            rope=ropes,
            **own,
        )

    def mixed_layers(
        self, other: str, is_other: Callable[[int], bool]
    ) -> tuple[frozenset[int], ConfigReader]:
        """Layers of a kind that is no attention, and a reader for `attention` of the others.

        Args:
            other: the kind's name in `layer_types`. is_other: of a layer, where there is no such
                list.
        """
        settings, num_layers = self.settings, self.num_layers
        types = settings.get("layer_types", list[str], [])
        if not settings.has("layer_types"):
            types = [other if is_other(i) else LAYER_TYPES[0] for i in range(num_layers)]
        if len(types) != num_layers:
            raise settings.error("layer_types", f"must have {num_layers} entries, one per layer")
        for layer, kind in enumerate(types):
            if kind not in (other, LAYER_TYPES[0]):
                raise ModelFileError(
                    f"{settings.source}: layer {layer} is {kind!r:.80} in layer_types, which is "
                    f"not implemented; known: {other}, {LAYER_TYPES[0]}"
                )
        if LAYER_TYPES[0] not in types:
            raise ModelFileError(
                f"{settings.source}: none of the {num_layers} layers is {LAYER_TYPES[0]} by "
                "layer_types, or what is there in its place: one is needed"
            )
        values = {name: value for name, value in settings.values.items() if name != "layer_types"}
        layers = frozenset(i for i, kind in enumerate(types) if kind == other)
        return layers, replace(self, settings=settings.with_values(values))

    def mlp(
        self, name: str = "hidden_act", activation: str = "silu", bias: bool = False
    ) -> MLPConfig:
        """Read what an MLP takes. name: of the activation's setting. activation: its default."""
        value = self.settings.get(name, str, activation)
        if value not in _ACTIVATIONS:
            why = f"is not implemented; known: {', '.join(_ACTIVATIONS)}"
            raise self.settings.error(name, why)
        return MLPConfig(self.settings.size("intermediate_size"), _ACTIVATIONS[value], bias)

    def moe(self, kind: type[MoeConfig] = MoeConfig, **own: Any) -> MoeConfig:
        """Read a mixture of experts. kind: the configuration's class. own: what it has more."""
        settings, num_layers = self.settings, self.num_layers
        # transformers 5 writes num_local_experts for Qwen3-MoE where everybody else has the other.
        name = "num_local_experts" if settings.has("num_local_experts") else "num_experts"
        num_experts = settings.size(name, most=MAX_EXPERTS // num_layers)
        per_tok = settings.size("num_experts_per_tok")
        if per_tok > num_experts:
            raise settings.error("num_experts_per_tok", f"exceeds {name} = {num_experts}")
        step = settings.size("decoder_sparse_step", 1)
        dense = set(settings.get("mlp_only_layers", list[int], []))
        return kind(
            num_experts=num_experts,
            num_experts_per_tok=per_tok,
            inner_size=settings.size("moe_intermediate_size"),
            norm_topk_prob=self.flag("norm_topk_prob"),
            sparse_layers=frozenset(
                i for i in range(num_layers) if (i + 1) % step == 0 and i not in dense
            ),
            **own,
        )

    def model(
        self,
        attention: AttentionConfig,
        mlp: MLPConfig,
        kind: type[ModelConfig] = ModelConfig,
        *,
        rms_norm_eps: float = 1e-6,
        tie_word_embeddings: bool = False,
        eos_token_id: int | None = None,
        **own: Any,
    ) -> ModelConfig:
        """Read what is left when the layers and the family's own settings are read.

        Args:
            kind: the configuration's class. own: what it has more.
            rms_norm_eps, tie_word_embeddings, eos_token_id: defaults.
        """
        settings = self.settings
        for name, value_type in _OF_SOME_FAMILIES.items():
            value = None if settings.was_read(name) else settings.get(name, value_type, None)
            if value is not None and value is not False:
                raise settings.error(name, _NOT_HERE)
        vocab_size, longest = settings.size("vocab_size"), settings.size("max_position_embeddings")
        max_len, longest = served_lengths(attention.rope.get("full_attention"), longest)
        return kind(
            architecture=self.architecture,
            vocab_size=vocab_size,
            hidden_size=settings.size("hidden_size"),
            num_layers=self.num_layers,
            max_model_len=max_len,
            longest_model_len=longest,
            tie_word_embeddings=self.flag("tie_word_embeddings", tie_word_embeddings),
            dtype=settings.get("dtype", str, settings.get("torch_dtype", str, "")),
            eos_token_ids=_eos_token_ids(settings, self.generation, eos_token_id, vocab_size),
            generation=read_generation_defaults(self.generation),
            attention=attention,
            mlp=mlp,
            norm_eps=settings.number("rms_norm_eps", rms_norm_eps, _EPS),
            **own,
        )

    def _heads(self, num_kv_heads: int | None, head_dim: int | None) -> tuple[int, int, int]:
        settings = self.settings
        num_heads, hidden_size = settings.size("num_attention_heads"), settings.size("hidden_size")
        if settings.is_set("num_key_value_heads"):
            num_kv_heads = settings.size("num_key_value_heads", num_heads)
        num_kv_heads = num_kv_heads or num_heads
        if num_heads % num_kv_heads:
            raise ModelFileError(
                f"{settings.source}: {num_heads} heads (num_attention_heads) cannot share "
                f"{num_kv_heads} KV heads (num_key_value_heads) evenly"
            )
        default = None if settings.is_set("head_dim") else head_dim  # null is no default
        if not settings.has("head_dim") and default is None and hidden_size % num_heads:
            raise settings.error("hidden_size", f"is not divisible by {num_heads} heads")
        head_dim = settings.size("head_dim", default or hidden_size // num_heads)
        return num_heads, num_kv_heads, head_dim

    def _layer_types(
        self, window: int | None, has_window: Callable[[int], bool], free_layer_types: bool
    ) -> tuple[tuple[LayerType, ...], int]:
        """Each layer's kind of attention, and the window in tokens; 0 if no layer has one."""
        settings = self.settings
        types: list[LayerType] = [LAYER_TYPES[has_window(i)] for i in range(self.num_layers)]
        declared = settings.get("layer_types", list[str], [])
        if declared and declared != types:
            if not free_layer_types:
                raise settings.error("layer_types", _NOT_HERE)
            if len(declared) != len(types):
                raise settings.error(
                    "layer_types", f"must have {len(types)} entries, one per layer"
                )
            types = [known for name in declared for known in LAYER_TYPES if known == name]
            if len(types) != len(declared):
                why = f"is not implemented; known: {', '.join(LAYER_TYPES)}"
                raise settings.error("layer_types", why)
        if "sliding_attention" not in types:
            return tuple(types), 0
        if window is None:
            raise ModelFileError(
                f"{settings.source}: layers of sliding_attention need a sliding_window"
                + (" and use_sliding_window" if settings.has("use_sliding_window") else "")
            )
        return tuple(types), settings.within("sliding_window", window, Range(1, MAX_SIZE))


def refuse_other_kinds(settings: Settings) -> None:
    """Refuse models that are no decoders of text. Raises ModelFileError: it is one."""
    for name in ("text_config", "vision_config"):
        if settings.has(name):
            raise settings.error(name)
    for name in ("use_bidirectional_attention", "is_encoder_decoder"):
        if settings.get(name, bool, False):
            raise settings.error(name)
    if not settings.get("is_causal", bool, True):
        raise settings.error("is_causal")


def _eos_token_ids(
    settings: Settings, generation: Settings, default: int | None, vocab_size: int
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
    ids = settings.get("eos_token_id", list[int] | int, None)  # type: ignore[arg-type]
    if isinstance(ids, int):
        return [ids]
    if ids is not None and len(ids) > _MAX_EOS_IDS:
        raise settings.error("eos_token_id", f"has {len(ids)} ids, and may have {_MAX_EOS_IDS}")
    return ids
