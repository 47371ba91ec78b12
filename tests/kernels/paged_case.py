"""A mixed batch over a paged cache, and what dense float64 attention makes of it."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.attention_step import make_metadata
from nanocore.kernels.attention import AttentionMetadata, AttentionSpec, KVCache
from nanocore.kernels.kv_quantization import kv_cache_format, quantize
from nanocore.kernels.select import select_kernels
from nanocore.kernels.torch.attention import store_kv
from tests.kernels.layered_cache import layered

HEAD_DIM = 16
PLAIN = AttentionSpec(scale=HEAD_DIM**-0.5)


@dataclass
class PagedCase:
    """KV scattered over shuffled blocks of a cache that is otherwise garbage.

    seqs: (context length including this step, query tokens), decodes first. kv_cache: "auto" for
    the values as they are, or the name of a quantized format. num_padding: tokens at the end of the
    step that belong to nobody. decode_tokens: the most of a decode. Blocks that a window has left
    are somebody else's, and what is there is NaN.
    """

    seqs: list[tuple[int, int]]
    block_size: int = 4
    heads: int = 4
    kv_heads: int = 2
    seed: int = 0
    spec: AttentionSpec = PLAIN
    kv_cache: str = "auto"
    num_padding: int = 0
    decode_tokens: int = 1

    def __post_init__(self) -> None:
        self.generator = torch.Generator().manual_seed(self.seed)
        self.kernels = select_kernels("torch", torch.device("cpu"))
        rng = random.Random(self.seed)
        widths = [-(-length // self.block_size) for length, _ in self.seqs]
        num_blocks = sum(widths) + 3
        free = list(range(num_blocks))
        rng.shuffle(free)
        self.cache = self.garbage(num_blocks, self.block_size, self.kv_heads, HEAD_DIM)
        rows = [
            [free.pop() for _ in range(width)] + [rng.randrange(num_blocks)] * (max(widths) - width)
            for width in widths
        ]
        self.block_table = torch.tensor(rows, dtype=torch.int32)
        self.others = free[0]
        self.k = [self.draw(length, self.kv_heads, HEAD_DIM) for length, _ in self.seqs]
        self.v = [self.draw(length, self.kv_heads, HEAD_DIM) for length, _ in self.seqs]
        self.q = [self.draw(count, self.heads, HEAD_DIM) for _, count in self.seqs]

    def draw(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator)

    def garbage(self, *shape: int) -> KVCache:
        k, v = 100 * self.draw(*shape), 100 * self.draw(*shape)
        if self.kv_cache == "auto":
            return layered(k, v)
        stored = kv_cache_format(self.kv_cache, torch.float32)
        assert stored.scale_dtype is not None
        k, k_scale = quantize(k, stored.dtype, stored.scale_dtype)
        v, v_scale = quantize(v, stored.dtype, stored.scale_dtype)
        return layered(k, v, k_scale, v_scale)

    def slots(self, i: int, start: int, end: int) -> Tensor:
        positions = torch.arange(start, end)
        blocks = self.block_table[i].long()[positions // self.block_size]
        return blocks * self.block_size + positions % self.block_size

    def metadata(self) -> AttentionMetadata:
        return make_metadata(
            self.seqs, self.block_table, self.block_size, self.num_padding,
            sum(count <= self.decode_tokens for _, count in self.seqs), self.decode_tokens,
        )  # fmt: skip

    def run(self) -> Tensor:
        """Attention of the step, [T, H, D], after storing what earlier steps and this one wrote."""
        for i, (length, count) in enumerate(self.seqs):
            past = length - count
            store_kv(self.k[i][:past], self.v[i][:past], self.cache, self.slots(i, 0, past))
        self.leave_windows()
        metadata = self.metadata()
        padding = self.draw(self.num_padding, self.kv_heads, HEAD_DIM)
        new_k = [k[n - c :] for k, (n, c) in zip(self.k, self.seqs, strict=True)]
        new_v = [v[n - c :] for v, (n, c) in zip(self.v, self.seqs, strict=True)]
        store_kv(
            torch.cat([*new_k, padding]),
            torch.cat([*new_v, padding]),
            self.cache,
            metadata.slot_mapping_T,
        )
        q_THD = torch.cat([*self.q, self.draw(self.num_padding, self.heads, HEAD_DIM)])
        return self.kernels.paged_attention(q_THD, self.cache, metadata, self.spec)

    def leave_windows(self) -> None:
        if not self.spec.window:
            return
        for part in (self.cache.k_NSKD, self.cache.v_NSKD, *self.cache_scales):
            if part.dtype != torch.int8:
                part[self.others] = torch.nan
        for i, (length, count) in enumerate(self.seqs):
            num_left = max(length - count - self.spec.window + 1, 0) // self.block_size
            self.block_table[i, :num_left] = self.others

    @property
    def cache_scales(self) -> list[Tensor]:
        scales = self.cache.k_scale_NSK, self.cache.v_scale_NSK
        return [scale for scale in scales if scale is not None]

    def as_stored(self, x: Tensor) -> Tensor:
        if self.kv_cache == "auto":
            return x
        stored = kv_cache_format(self.kv_cache, torch.float32)
        assert stored.scale_dtype is not None
        values, scale = quantize(x, stored.dtype, stored.scale_dtype)
        return values.float() * scale.float()[..., None]

    def expected(self) -> Tensor:
        outputs = []
        for q, k, v, (length, count) in zip(self.q, self.k, self.v, self.seqs, strict=True):
            group = self.heads // self.kv_heads
            k64 = self.as_stored(k).double().repeat_interleave(group, dim=1)
            v64 = self.as_stored(v).double().repeat_interleave(group, dim=1)
            scores = torch.einsum("qhd,khd->hqk", q.double(), k64) * self.spec.scale
            if self.spec.softcap:
                scores = self.spec.softcap * torch.tanh(scores / self.spec.softcap)
            ago = torch.arange(length - count, length)[:, None] - torch.arange(length)
            unseen = ago < 0
            if self.spec.window:
                unseen |= ago >= self.spec.window
            weights = scores.masked_fill(unseen, -torch.inf).softmax(-1)
            outputs.append(torch.einsum("hqk,khd->qhd", weights, v64))
        return torch.cat(outputs)
