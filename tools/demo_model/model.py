"""A compact Qwen3 in plain PyTorch, for training the demo model on a CPU.

The same mathematics and parameter names as transformers' Qwen3ForCausalLM (RMS norms, per-head
norms of queries and keys, rotary positions, grouped key/value heads, SwiGLU, tied embeddings),
without its overheads: a batch is right-padded, so causal attention needs no mask.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class ModelConfig:
    """The sizes of the model."""

    vocab_size: int
    hidden_size: int = 192
    intermediate_size: int = 512
    num_hidden_layers: int = 5
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 64
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    max_position_embeddings: int = 2048


def rotary_tables(config: ModelConfig) -> tuple[Tensor, Tensor]:
    """Cosines and sines by position, in the "rotate half" layout."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    frequencies = config.rope_theta**-exponents
    angles = torch.outer(torch.arange(config.max_position_embeddings).float(), frequencies)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


def norm(x: Tensor, layer: nn.RMSNorm) -> Tensor:
    """The norm with weights cast to the type of `x`, which keeps PyTorch's fused kernel."""
    return F.rms_norm(x, layer.normalized_shape, layer.weight.to(x.dtype), layer.eps)


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention; written out for short texts, where it is twice as fast on a CPU."""
    time = q.shape[2]
    if time > 512:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)
    future = torch.full((time, time), float("-inf"), dtype=q.dtype).triu(1)
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5 + future
    return torch.softmax(scores, dim=-1, dtype=q.dtype) @ v


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn queries or keys of shape (batch, heads, time, head_dim) by their positions."""
    low, high = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-high, low), dim=-1) * sin


class Attention(nn.Module):
    """Causal self-attention with grouped key/value heads and per-head norms."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_dim, self.eps = config.head_dim, config.rms_norm_eps
        self.groups = config.num_attention_heads // config.num_key_value_heads
        queries = config.num_attention_heads * config.head_dim
        keys = config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, queries, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, keys, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, keys, bias=False)
        self.o_proj = nn.Linear(queries, config.hidden_size, bias=False)
        self.q_norm = nn.RMSNorm(config.head_dim, eps=self.eps)
        self.k_norm = nn.RMSNorm(config.head_dim, eps=self.eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, time, _ = x.shape
        heads = (batch, time, -1, self.head_dim)
        v = self.v_proj(x).view(heads).transpose(1, 2)
        cos, sin = cos.to(v.dtype), sin.to(v.dtype)
        q = rotate(norm(self.q_proj(x).view(heads), self.q_norm).transpose(1, 2), cos, sin)
        k = rotate(norm(self.k_proj(x).view(heads), self.k_norm).transpose(1, 2), cos, sin)
        k = k.repeat_interleave(self.groups, dim=1)
        v = v.repeat_interleave(self.groups, dim=1)
        mixed = attend(q, k, v)
        return self.o_proj(mixed.transpose(1, 2).reshape(batch, time, -1))


class MLP(nn.Module):
    """The SwiGLU feed-forward part."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        inner = config.intermediate_size
        self.gate_proj = nn.Linear(config.hidden_size, inner, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, inner, bias=False)
        self.down_proj = nn.Linear(inner, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """One transformer layer, with its norms before attention and before the MLP."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.self_attn = Attention(config)
        self.mlp = MLP(config)
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class Transformer(nn.Module):
    """Embeddings, layers and the last norm: what transformers calls `model`."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)


class DemoModel(nn.Module):
    """The causal language model; its output weights are the embeddings."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.model = Transformer(config)
        cos, sin = rotary_tables(config)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        depth_scale = (2 * config.num_hidden_layers) ** -0.5
        for name, weight in self.named_parameters():
            if weight.dim() == 2:
                residual = name.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.normal_(weight, std=0.04 * (depth_scale if residual else 1.0))

    def forward(self, ids: Tensor, wanted: Tensor) -> Tensor:
        """Logits at the positions where the flat mask `wanted` (batch * time) is true."""
        x = self.model.embed_tokens(ids)
        cos, sin = self.cos[: ids.shape[1]], self.sin[: ids.shape[1]]
        for layer in self.model.layers:
            x = layer(x, cos, sin)
        x = self.model.norm(x.flatten(0, 1)[wanted])
        return F.linear(x, self.model.embed_tokens.weight)
