"""GPT-2 (Radford et al. 2019): layer norms, learned positions in place of rotations, plain MLPs.

Checkpoints hold linear layers transposed, Q, K and V as one, and names of their own, with a prefix
or without.
"""

from __future__ import annotations

from typing import ClassVar, Final

from torch import Tensor

from nanocore.kernels.states import LayerCache
from nanocore.worker.config.config_json import ConfigReader
from nanocore.worker.config.json_settings import Range, Settings
from nanocore.worker.config.model_config import ModelConfig
from nanocore.worker.config.rope_config import Ropes
from nanocore.worker.layers.decoder import DecoderLayer, DecoderModel
from nanocore.worker.layers.linear import StepContext
from nanocore.worker.layers.mlp import PlainMLP
from nanocore.worker.layers.norm import LayerNorm
from nanocore.worker.loading.weights import POSITIONS, Entries, TensorEntry, transposed, whole
from nanocore.worker.placement import Placement

_PREFIXES: Final = {
    "h.": "model.layers.", "ln_f.": "model.norm.", "wte.": "model.embed_tokens.",
    "wpe.": "model.embed_positions.",
}  # fmt: skip
_EPS: Final = Range(1e-30, 1)


def _no_rope(settings: Settings, _head_dim: int) -> Ropes:
    for name in ("rope_parameters", "rope_scaling", "rope_theta"):
        if settings.has(name):
            raise settings.error(name, "is not implemented for this architecture")
    return {}


class GPT2Layer(DecoderLayer):
    """The common layer of other parts, under other names."""

    norm_class = LayerNorm
    norms: ClassVar[dict[str, str]] = {"input_norm": "ln_1", "post_attention_norm": "ln_2"}
    mlp: PlainMLP

    def make_mlp(self, placement: Placement, config: ModelConfig, layer: int) -> PlainMLP:
        return PlainMLP(placement, config.mlp, config.hidden_size)

    def entries(self, prefix: str) -> Entries:
        linear = {
            **self.mixer.qkv_proj.fused_entries(f"{prefix}attn.c_attn"),
            **self.mixer.o_proj.entries(f"{prefix}attn.c_proj"),
            **self.mlp.in_proj.entries(f"{prefix}mlp.c_fc"),
            **self.mlp.down_proj.entries(f"{prefix}mlp.c_proj"),
        }
        for name, entry in linear.items():
            # Quantized weights are stored as in any other model.
            if len(entry.shape) == 2 and entry.dtype is None:
                linear[name] = transposed(entry)
        return linear | self.norm_entries(prefix)


class GPT2Model(DecoderModel):
    """The first stage knows the positions."""

    layer_class = GPT2Layer

    def __init__(self, config: ModelConfig, placement: Placement) -> None:
        super().__init__(config, placement)
        self.positions_shape = config.longest_model_len, config.hidden_size
        self.positions_LE: Tensor | None = None
        if placement.is_first_stage:
            self.positions_LE = placement.empty(*self.positions_shape)

    @classmethod
    def translate(cls, settings: Settings) -> Settings:
        hidden_size, num_heads = settings.size("n_embd"), settings.size("n_head")
        common = {
            "hidden_size": hidden_size,
            "intermediate_size": settings.size("n_inner", 4 * hidden_size),
            "num_hidden_layers": settings.size("n_layer"),
            "num_attention_heads": num_heads,
            "num_key_value_heads": num_heads,
            "max_position_embeddings": settings.size("n_positions"),
            "rms_norm_eps": settings.number("layer_norm_epsilon", 1e-5, _EPS),
        }
        for name in ("add_cross_attention", "scale_attn_by_inverse_layer_idx"):
            if settings.get(name, bool, False):
                raise settings.error(name)
        return settings.with_values(settings.values | common)

    @classmethod
    def read(cls, reader: ConfigReader) -> ModelConfig:
        scale = None if reader.flag("scale_attn_weights", True) else 1.0
        return reader.model(
            reader.attention(bias=True, scale=scale, rope=_no_rope),
            reader.mlp("activation_function", "gelu_new", bias=True),
            tie_word_embeddings=True,
            eos_token_id=50256,
        )

    def entries(self) -> Entries:
        positions = TensorEntry(self.positions_shape)
        if self.positions_LE is not None:
            positions = whole(self.positions_LE)
        return {POSITIONS: positions, **super().entries()}

    @classmethod
    def common_name(cls, stored: str) -> str | None:
        name = stored.removeprefix("transformer.")
        if name.endswith((".attn.bias", ".attn.masked_bias")):
            return None  # the causal mask
        for own, common in _PREFIXES.items():
            if name.startswith(own):
                return common + name.removeprefix(own)
        return super().common_name(stored)

    def forward(
        self, x_TE: Tensor, caches: list[LayerCache], context: StepContext, sample_index_R: Tensor
    ) -> Tensor:
        if self.positions_LE is not None:
            x_TE = x_TE + self.positions_LE[context.metadata[0].positions_T]
        return super().forward(x_TE, caches, context, sample_index_R)
