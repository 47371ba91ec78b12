"""The reference backend: plain torch on any device, written to be checked by eye.

It gathers the paged cache into contiguous tensors before attention, which costs memory traffic but
no cleverness. Every other backend is compared with this one. Shape suffixes: see `backend`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from nanocore.kernels.torch_sampling import sample

if TYPE_CHECKING:
    from nanocore.kernels.backend import AttentionMetadata, SamplingMetadata

MAX_GATHERED_TOKENS = 1 << 15
"""Context tokens that one gather of decodes copies: bounds the temporary memory of a layer."""


class TorchKernels:
    """Implements `backend.Kernels`."""

    name = "torch"

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        x_float = x.float()
        scale = torch.rsqrt(x_float.pow(2).mean(-1, keepdim=True) + eps)
        return weight * (x_float * scale).to(x.dtype)

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        residual = residual + x
        return self.rms_norm(residual, weight, eps), residual

    def rope(self, x_THD: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
        first, second = x_THD.chunk(2, dim=-1)
        cos, sin = cos_TD[:, None], sin_TD[:, None]
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)

    def silu_and_mul(self, x: Tensor) -> Tensor:
        gate, up = x.chunk(2, dim=-1)
        return F.silu(gate) * up

    def store_kv(
        self,
        k_TKD: Tensor,
        v_TKD: Tensor,
        k_cache_NSKD: Tensor,
        v_cache_NSKD: Tensor,
        slot_mapping_T: Tensor,
    ) -> None:
        k_cache_NSKD.flatten(0, 1)[slot_mapping_T] = k_TKD
        v_cache_NSKD.flatten(0, 1)[slot_mapping_T] = v_TKD

    def paged_attention(
        self,
        q_THD: Tensor,
        k_cache_NSKD: Tensor,
        v_cache_NSKD: Tensor,
        metadata: AttentionMetadata,
        scale: float,
    ) -> Tensor:
        out_THD = torch.empty_like(q_THD)
        num_decodes = metadata.num_decodes
        if num_decodes:
            longest = max(metadata.seq_lens[:num_decodes])
            step = max(1, MAX_GATHERED_TOKENS // longest)
            for start in range(0, num_decodes, step):
                part = slice(start, min(start + step, num_decodes))
                out_THD[part] = _decode_attention(
                    q_THD[part], k_cache_NSKD, v_cache_NSKD, metadata, part, scale
                )
        for i in range(num_decodes, len(metadata.seq_lens)):
            tokens = slice(metadata.query_start[i], metadata.query_start[i + 1])
            out_THD[tokens] = _chunk_attention(
                q_THD[tokens],
                k_cache_NSKD,
                v_cache_NSKD,
                metadata.block_table_BM[i],
                metadata.seq_lens[i],
                scale,
            )
        return out_THD

    def sample(self, logits_RV: Tensor, metadata: SamplingMetadata) -> Tensor:
        return sample(logits_RV, metadata)


def _decode_attention(
    q_BHD: Tensor,
    k_cache_NSKD: Tensor,
    v_cache_NSKD: Tensor,
    metadata: AttentionMetadata,
    part: slice,
    scale: float,
) -> Tensor:
    """One query token per sequence; contexts are padded to the longest and masked."""
    num_seqs, num_heads, head_dim = q_BHD.shape
    block_size, num_kv_heads = k_cache_NSKD.shape[1:3]
    longest = max(metadata.seq_lens[part])
    table_BM = metadata.block_table_BM[part, : -(-longest // block_size)].long()
    k_BKLD = k_cache_NSKD[table_BM].flatten(1, 2).transpose(1, 2)
    v_BKLD = v_cache_NSKD[table_BM].flatten(1, 2).transpose(1, 2)
    positions_L = torch.arange(k_BKLD.shape[2], device=q_BHD.device)
    mask_B11L = (positions_L < metadata.seq_lens_B[part, None])[:, None, None]
    # The query heads of a KV head become its query positions: no head is copied.
    q_BKGD = q_BHD.view(num_seqs, num_kv_heads, num_heads // num_kv_heads, head_dim)
    out = F.scaled_dot_product_attention(q_BKGD, k_BKLD, v_BKLD, mask_B11L, scale=scale)
    return out.reshape(num_seqs, num_heads, head_dim)


def _chunk_attention(
    q_QHD: Tensor,
    k_cache_NSKD: Tensor,
    v_cache_NSKD: Tensor,
    block_table_M: Tensor,
    seq_len: int,
    scale: float,
) -> Tensor:
    """The last Q tokens of one sequence, each over itself and all before it."""
    num_queries, num_heads, head_dim = q_QHD.shape
    block_size, num_kv_heads = k_cache_NSKD.shape[1:3]
    group = num_heads // num_kv_heads
    table = block_table_M[: -(-seq_len // block_size)].long()
    k_1KLD = k_cache_NSKD[table].flatten(0, 1)[None, :seq_len].transpose(1, 2)
    v_1KLD = v_cache_NSKD[table].flatten(0, 1)[None, :seq_len].transpose(1, 2)
    positions = torch.arange(seq_len, device=q_QHD.device)
    mask_QL = positions <= positions[seq_len - num_queries :, None]
    q_1KXD = (
        q_QHD.view(num_queries, num_kv_heads, group, head_dim)
        .permute(1, 2, 0, 3)
        .reshape(1, num_kv_heads, group * num_queries, head_dim)
    )
    out = F.scaled_dot_product_attention(
        q_1KXD, k_1KLD, v_1KLD, mask_QL.repeat(group, 1), scale=scale
    )
    return (
        out.view(num_kv_heads, group, num_queries, head_dim)
        .permute(2, 0, 1, 3)
        .reshape(num_queries, num_heads, head_dim)
    )
