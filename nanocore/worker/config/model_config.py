"""What a model is, whatever its files call it: one shape for all families."""

from __future__ import annotations

from typing import Literal

import msgspec

from nanocore.kernels import Activation
from nanocore.worker.config.generation_config import GenerationDefaults
from nanocore.worker.config.rope_config import LayerType, RopeConfig


class MoeConfig(msgspec.Struct, frozen=True, kw_only=True):
    """A mixture of experts in place of some layers' MLPs.

    intermediate_size: of one expert. norm_topk_prob: the chosen experts' weights are scaled to sum
    to 1. sparse_layers: indices of the layers that have experts. shared_intermediate_size: of the
    gated expert that every token passes, 0 if there is none.
    """

    num_experts: int
    num_experts_per_tok: int
    intermediate_size: int
    norm_topk_prob: bool
    sparse_layers: frozenset[int]
    shared_intermediate_size: int = 0


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """A decoder-only transformer.

    max_model_len: positions that the model serves if nobody asks for more, and longest_model_len if
    somebody does: dynamic NTK and LongRoPE bend every position as soon as they are to serve more
    than the model was trained for.
    dtype: the checkpoint's, as torch spells it; "" if config.json does not name it.
    eos_token_ids: of generation_config.json, or else of config.json; each is in the vocabulary.
    hidden_act: of MLPs and of experts.
    attention_bias: of Q, K and V. mlp_bias: of all three projections.
    layer_types: one per layer. sliding_window: how many tokens a layer of sliding_attention sees,
    the current one included; 0 if there is no such layer.
    query_scale: what the products of queries and keys are multiplied by.
    attn_logit_softcapping, final_logit_softcapping: logits become cap * tanh(logits / cap); 0 is
    off.
    logits_divisor: what logits are divided by, before they are capped.
    embedding_scale: what embeddings are multiplied by, once rounded to the model's dtype.
    rope: for both layer types, whether or not a layer has them; empty if no layer rotates.
    unrotated_layers: indices of those whose heads do not (NoPE: Kazemnejad et al. 2023).
    moe: None if all layers are dense.
    qk_norm: heads of Q and K are normed. norm_offset: what norm weights are stored less, unless
    norms_are_whole: this checkpoint has it in them.
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
    longest_model_len: int
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
    logits_divisor: float = 1.0
    embedding_scale: float
    rope: dict[LayerType, RopeConfig]
    unrotated_layers: frozenset[int]
    moe: MoeConfig | None
    qk_norm: bool
    norm_offset: float
    norms_are_whole: bool = False
    fits_float16: bool
    generation: GenerationDefaults

    def rotation(self, layer: int) -> LayerType | Literal["none"]:
        """Name of the rotation in `rope` that a layer has."""
        return "none" if layer in self.unrotated_layers else self.layer_types[layer]
