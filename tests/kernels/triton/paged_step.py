"""Sequences of which any piece can be a step's, over a paged cache whose unused slots are NaN."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from benchmarks.attention_step import make_metadata
from nanocore.kernels.attention import AttentionMetadata, AttentionSpec, KVCache
from nanocore.kernels.kv_quantization import KVCacheFormat, kv_cache_format, quantize
from nanocore.kernels.torch.attention import store_kv
from nanocore.kernels.triton.paged_attention import paged_attention
from tests.kernels.layered_cache import layered

NAN = float("nan")


@dataclass(frozen=True)
class Heads:
    """Of a model. num: query heads."""

    num: int = 4
    num_kv: int = 2
    dim: int = 16

    def spec(self, window: int = 0, softcap: float = 0.0) -> AttentionSpec:
        return AttentionSpec(self.dim**-0.5, window, softcap)


@dataclass(frozen=True)
class Sequence:
    """A context: Q, K and V of each of its tokens."""

    q_LHD: Tensor
    k_LKD: Tensor
    v_LKD: Tensor

    @classmethod
    def draw(cls, length: int, heads: Heads, seed: int = 0) -> Sequence:
        generator = torch.Generator().manual_seed(1000 * seed + length)
        return cls(
            *(
                torch.randn(length, num, heads.dim, generator=generator)
                for num in (heads.num, heads.num_kv, heads.num_kv)
            )
        )


@dataclass(frozen=True)
class Piece:
    """The last num_queries of a sequence's first seq_len tokens. seq_len 0: that much padding."""

    sequence: Sequence
    seq_len: int
    num_queries: int = 1


@dataclass
class PagedStep:
    """Pieces, decodes first, whose K and V are in the cache.

    decode_tokens: the most of a decode. max_decodes: what the host knows at capture, if not how
    many there are. spare_columns: of the block table. num_padding: tokens that belong to no
    sequence, at the end.
    """

    heads: Heads
    pieces: list[Piece]
    num_decodes: int
    spec: AttentionSpec
    block_size: int = 4
    kv_cache: str = "auto"
    decode_tokens: int = 1
    max_decodes: int | None = None
    spare_columns: int = 0
    num_padding: int = 0
    cache: KVCache = field(init=False)
    metadata: AttentionMetadata = field(init=False)

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(len(self.pieces))
        widths = [-(-piece.seq_len // self.block_size) for piece in self.pieces]
        num_blocks = sum(widths) + 3
        free = torch.randperm(num_blocks, generator=generator).int()
        # A view of a wider table; what follows a row's own blocks is any block.
        shape = len(self.pieces), max(widths) + self.spare_columns + 5
        table = torch.randint(num_blocks, shape, generator=generator, dtype=torch.int32)
        for row, width in zip(table, widths, strict=True):
            row[:width], free = free[:width], free[width:]
        self.cache = self._unused_cache(num_blocks)
        for row, piece in zip(table, self.pieces, strict=True):
            positions = torch.arange(piece.seq_len)
            slots = row.long()[positions // self.block_size] * self.block_size
            slots += positions % self.block_size
            k, v = piece.sequence.k_LKD[: len(slots)], piece.sequence.v_LKD[: len(slots)]
            store_kv(k, v, self.cache, slots)
            if self.spec.window:  # blocks that nobody sees any more are another request's
                first = piece.seq_len - piece.num_queries - self.spec.window + 1
                row[: max(first, 0) // self.block_size] = free[0]
        self.metadata = self._metadata(table[:, : max(1, max(widths) + self.spare_columns)])

    def _unused_cache(self, num_blocks: int) -> KVCache:
        shape = num_blocks, self.block_size, self.heads.num_kv, self.heads.dim
        if self.kv_cache == "auto":
            return layered(torch.full(shape, NAN), torch.full(shape, NAN))
        stored = self._format()
        # Of fp8 these bytes are NaN.
        k, v = (torch.full(shape, 127, dtype=torch.uint8).view(stored.dtype) for _ in "kv")
        scales = (torch.full(shape[:3], NAN, dtype=stored.scale_dtype) for _ in "kv")
        return layered(k, v, *scales)

    def _format(self) -> KVCacheFormat:
        return kv_cache_format(self.kv_cache, torch.float32, "cuda")

    def _metadata(self, table_BM: Tensor) -> AttentionMetadata:
        seqs = [(piece.seq_len, piece.num_queries) for piece in self.pieces]
        metadata = make_metadata(
            seqs, table_BM, num_decodes=self.num_decodes, decode_tokens=self.decode_tokens
        )
        if self.max_decodes is None:
            return metadata
        return replace(metadata, num_decodes=self.max_decodes)

    def q_THD(self) -> Tensor:
        """Queries with gaps between tokens, as they lie among keys and values."""
        num_tokens = sum(piece.num_queries for piece in self.pieces) + self.num_padding
        num_columns = self.heads.num + 2 * self.heads.num_kv
        q_THD = torch.full((num_tokens, num_columns, self.heads.dim), NAN)[:, : self.heads.num]
        token = 0
        for piece in self.pieces:
            first = piece.seq_len - piece.num_queries
            if piece.seq_len:
                q_THD[token : token + piece.num_queries] = piece.sequence.q_LHD[
                    first : piece.seq_len
                ]
            token += piece.num_queries
        return q_THD

    def run(self, num_sms: int = 1, batch_invariant: bool = False) -> Tensor:
        return paged_attention(
            self.q_THD(),
            self.cache,
            self.metadata,
            self.spec,
            num_sms=num_sms,
            batch_invariant=batch_invariant,
        )

    def expected(self) -> Tensor:
        rows = [self._expected_piece(piece) for piece in self.pieces]
        rows.append(torch.zeros(self.num_padding, self.heads.num, self.heads.dim))
        return torch.cat(rows)

    def _expected_piece(self, piece: Piece) -> Tensor:
        length, count, group = piece.seq_len, piece.num_queries, self.heads.num // self.heads.num_kv
        if length == 0:
            return torch.zeros(count, self.heads.num, self.heads.dim)
        k = self._as_stored(piece.sequence.k_LKD[:length]).double().repeat_interleave(group, dim=1)
        v = self._as_stored(piece.sequence.v_LKD[:length]).double().repeat_interleave(group, dim=1)
        q = piece.sequence.q_LHD[length - count : length].double()
        scores = torch.einsum("qhd,khd->hqk", q, k) * self.spec.scale
        if self.spec.softcap:
            scores = self.spec.softcap * torch.tanh(scores / self.spec.softcap)
        ago = torch.arange(length - count, length)[:, None] - torch.arange(length)
        unseen = ago < 0
        if self.spec.window:
            unseen |= ago >= self.spec.window
        weights = scores.masked_fill(unseen, -torch.inf).softmax(-1)
        return torch.einsum("hqk,khd->qhd", weights, v)

    def _as_stored(self, x: Tensor) -> Tensor:
        if self.kv_cache == "auto":
            return x
        values, scale = quantize(x, self._format().dtype, torch.float32)
        return values.double() * scale.double()[..., None]


def draw_step(
    heads: Heads,
    decodes: list[int],
    chunks: list[tuple[int, int]] = [],  # noqa: B006
    *,
    window: int = 0,
    softcap: float = 0.0,
    **options: object,
) -> PagedStep:
    shapes = [(length, 1) for length in decodes] + chunks
    pieces = [
        Piece(Sequence.draw(length, heads, seed), length, count)
        for seed, (length, count) in enumerate(shapes)
    ]
    step = PagedStep(heads, pieces, len(decodes), heads.spec(window, softcap))
    return replace(step, **options)  # type: ignore[arg-type]
