"""Qwen3: a pre-norm decoder with grouped-query attention, QK-norm, RoPE and a SwiGLU MLP.

(Qwen3 technical report, 2025.) Q, K and V are one projection, and so are gate and up.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from nanocore.worker.layers import KVCache, Linear, RotaryTable, StepContext
from nanocore.worker.model_config import ModelConfig


class Qwen3Attention:
    """Attention over the paged KV cache."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
        self.num_heads, self.num_kv_heads = config.num_heads, config.num_kv_heads
        self.head_dim, self.eps = config.head_dim, config.rms_norm_eps
        q_size, kv_size = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        self.qkv_proj = Linear(config.hidden_size, [q_size, kv_size, kv_size], dtype, device)
        self.o_proj = Linear(q_size, [config.hidden_size], dtype, device)
        self.q_norm = torch.empty(self.head_dim, dtype=dtype, device=device)
        self.k_norm = torch.empty(self.head_dim, dtype=dtype, device=device)

    def slots(self, prefix: str) -> dict[str, Tensor]:
        return {
            **self.qkv_proj.slots(f"{prefix}q_proj", f"{prefix}k_proj", f"{prefix}v_proj"),
            **self.o_proj.slots(f"{prefix}o_proj"),
            f"{prefix}q_norm.weight": self.q_norm,
            f"{prefix}k_norm.weight": self.k_norm,
        }

    def __call__(self, x_TE: Tensor, cache: KVCache, context: StepContext) -> Tensor:
        kernels = context.kernels
        q, k, v = self.qkv_proj(x_TE).split(self.qkv_proj.out_features, dim=-1)
        q_THD = q.unflatten(-1, (self.num_heads, self.head_dim))
        k_TKD = k.unflatten(-1, (self.num_kv_heads, self.head_dim))
        v_TKD = v.unflatten(-1, (self.num_kv_heads, self.head_dim))
        q_THD = kernels.rms_norm(q_THD, self.q_norm, self.eps)
        k_TKD = kernels.rms_norm(k_TKD, self.k_norm, self.eps)
        q_THD = kernels.rope(q_THD, context.cos_TD, context.sin_TD)
        k_TKD = kernels.rope(k_TKD, context.cos_TD, context.sin_TD)
        slot_mapping_T = context.metadata.slot_mapping_T
        kernels.store_kv(k_TKD, v_TKD, cache.k_NSKD, cache.v_NSKD, slot_mapping_T)
        out_THD = kernels.paged_attention(
            q_THD, cache.k_NSKD, cache.v_NSKD, context.metadata, self.head_dim**-0.5
        )
        return self.o_proj(out_THD.flatten(1))


class Qwen3Layer:
    """One decoder layer; the residual stream is carried apart from the layer's output."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
        hidden, inner = config.hidden_size, config.intermediate_size
        self.eps = config.rms_norm_eps
        self.attention = Qwen3Attention(config, dtype, device)
        self.gate_up_proj = Linear(hidden, [inner, inner], dtype, device)
        self.down_proj = Linear(inner, [hidden], dtype, device)
        self.input_norm = torch.empty(hidden, dtype=dtype, device=device)
        self.post_attention_norm = torch.empty(hidden, dtype=dtype, device=device)

    def slots(self, prefix: str) -> dict[str, Tensor]:
        return {
            **self.attention.slots(f"{prefix}self_attn."),
            **self.gate_up_proj.slots(f"{prefix}mlp.gate_proj", f"{prefix}mlp.up_proj"),
            **self.down_proj.slots(f"{prefix}mlp.down_proj"),
            f"{prefix}input_layernorm.weight": self.input_norm,
            f"{prefix}post_attention_layernorm.weight": self.post_attention_norm,
        }

    def __call__(
        self, x_TE: Tensor, residual_TE: Tensor | None, cache: KVCache, context: StepContext
    ) -> tuple[Tensor, Tensor]:
        kernels = context.kernels
        if residual_TE is None:
            residual_TE = x_TE
            x_TE = kernels.rms_norm(x_TE, self.input_norm, self.eps)
        else:
            x_TE, residual_TE = kernels.add_rms_norm(x_TE, residual_TE, self.input_norm, self.eps)
        x_TE = self.attention(x_TE, cache, context)
        x_TE, residual_TE = kernels.add_rms_norm(
            x_TE, residual_TE, self.post_attention_norm, self.eps
        )
        x_TE = self.down_proj(kernels.silu_and_mul(self.gate_up_proj(x_TE)))
        return x_TE, residual_TE


class Qwen3Model:
    """The whole model: token ids to hidden states, hidden states to logits."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
        self.config, self.dtype, self.device = config, dtype, device
        shape = (config.vocab_size, config.hidden_size)
        self.embedding = torch.empty(shape, dtype=dtype, device=device)
        self.layers = [Qwen3Layer(config, dtype, device) for _ in range(config.num_layers)]
        self.norm = torch.empty(config.hidden_size, dtype=dtype, device=device)
        tied = config.tie_word_embeddings
        self.lm_head = self.embedding if tied else torch.empty_like(self.embedding)

    def slots(self) -> dict[str, Tensor]:
        """Where each checkpoint tensor goes."""
        slots = {
            "model.embed_tokens.weight": self.embedding,
            "model.norm.weight": self.norm,
        }
        if self.lm_head is not self.embedding:
            slots["lm_head.weight"] = self.lm_head
        for i, layer in enumerate(self.layers):
            slots |= layer.slots(f"model.layers.{i}.")
        return slots

    @property
    def ignored_tensors(self) -> frozenset[str]:
        """Checkpoint tensors that may be present and are not read."""
        return frozenset(() if "lm_head.weight" in self.slots() else {"lm_head.weight"})

    def rotary_table(self, max_len: int) -> RotaryTable:
        """cos and sin for positions below max_len."""
        config = self.config
        return RotaryTable(config.head_dim, config.rope_theta, max_len, self.dtype, self.device)

    def forward(self, token_ids_T: Tensor, caches: list[KVCache], context: StepContext) -> Tensor:
        """Final hidden states [T, E] of a step's tokens; writes their K and V."""
        x_TE = F.embedding(token_ids_T, self.embedding)
        residual_TE = None
        for layer, cache in zip(self.layers, caches, strict=True):
            x_TE, residual_TE = layer(x_TE, residual_TE, cache, context)
        assert residual_TE is not None, "a model has at least one layer"
        return context.kernels.add_rms_norm(x_TE, residual_TE, self.norm, self.config.rms_norm_eps)[
            0
        ]

    def compute_logits(self, hidden_RE: Tensor) -> Tensor:
        """Logits, float32 [R, V], only for the rows that sample."""
        return F.linear(hidden_RE, self.lm_head).float()
