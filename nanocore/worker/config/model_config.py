"""What the engine asks of any model, and what the shared layers take.

A family whose layers need more has a subclass of these in its own file.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from nanocore.kernels import Activation, Score
from nanocore.worker.config.generation_config import GenerationDefaults
from nanocore.worker.config.rope_config import LayerType, Ropes


class AttentionConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What `Attention` takes.

    bias: of Q, K and V.
    scale: what the products of queries and keys are multiplied by.
    softcap: these become cap * tanh(products / cap); 0 is off.
    qk_norm: heads of Q and K are normed.
    layer_types: one per layer. sliding_window: how many tokens a layer of sliding_attention sees,
    the current one included; 0 if there is no such layer.
    unrotated_layers: indices of those whose heads do not (NoPE: Kazemnejad et al. 2023).
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    bias: bool
    o_proj_bias: bool
    scale: float
    softcap: float = 0.0
    qk_norm: bool = False
    layer_types: tuple[LayerType, ...]
    sliding_window: int
    rope: Ropes
    unrotated_layers: frozenset[int] = frozenset()

    def rotation(self, layer: int) -> LayerType | Literal["none"]:
        """Name of the rotation in `rope` that a layer has."""
        is_still = not self.rope or layer in self.unrotated_layers
        return "none" if is_still else self.layer_types[layer]

    def window(self, layer: int) -> int:
        """Tokens that a layer sees; 0 for all."""
        return self.sliding_window if self.layer_types[layer] == "sliding_attention" else 0


class MLPConfig(msgspec.Struct, frozen=True):
    """What an MLP takes. activation: experts have it, too. bias: of all projections."""

    inner_size: int
    activation: Activation
    bias: bool


class MoeConfig(msgspec.Struct, frozen=True, kw_only=True):
    """A mixture of experts in place of some layers' MLPs.

    inner_size: of one expert. norm_topk_prob: the chosen experts' weights are scaled to sum to 1.
    sparse_layers: indices of the layers that have experts. has_bias: experts are chosen by scores
    plus a bias. score, epsilon, factor: see `Routing`.
    """

    num_experts: int
    num_experts_per_tok: int
    inner_size: int
    norm_topk_prob: bool
    sparse_layers: frozenset[int]
    score: Score = "softmax"
    has_bias: bool = False
    epsilon: float = 0.0
    factor: float = 1.0


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """A decoder-only transformer.

    max_model_len: positions that the model serves if nobody asks for more, and longest_model_len if
    somebody does: dynamic NTK and LongRoPE bend every position as soon as they are to serve more
    than the model was trained for.
    dtype: the checkpoint's, as torch spells it; "" if config.json does not name it.
    fits_float16: activations stay within its range.
    eos_token_ids: of generation_config.json, or else of config.json; each is in the vocabulary.
    moe: None if all layers are dense.
    num_mtp_layers: layers of an MTP head that the checkpoint has beside these, by config.json.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    max_model_len: int
    longest_model_len: int
    tie_word_embeddings: bool
    dtype: str
    fits_float16: bool = True
    eos_token_ids: tuple[int, ...]
    generation: GenerationDefaults
    attention: AttentionConfig
    mlp: MLPConfig
    moe: MoeConfig | None = None
    norm_eps: float
    num_mtp_layers: int = 0

    @property
    def delta_dims(self) -> tuple[int, int] | None:
        """Sizes of keys and values of a delta rule's heads; None: no layer has one."""
        return None


class OffsetNormConfig(ModelConfig, frozen=True, kw_only=True):
    """norms_are_whole: llama.cpp's converter has added the one that checkpoints leave out."""

    norms_are_whole: bool
