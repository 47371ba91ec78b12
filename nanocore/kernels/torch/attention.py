"""Paged attention in plain torch, in pieces of bounded size.

K and V of the tokens that a piece can see are gathered from the paged cache into contiguous
tensors, which costs memory traffic but no cleverness: decodes several sequences at a time, a chunk
a few hundred query tokens at a time. With a window only the blocks that it reaches are read.
Besides one context's K and V (with a softcap in float32 too), a piece's temporaries stay within a
small multiple of the constants below, whatever the lengths. Shape suffixes: see `interface`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from nanocore.kernels.attention import AttentionMetadata, AttentionSpec, KVCache, QKNorm, Rotary
from nanocore.kernels.kv_quantization import quantize
from nanocore.kernels.torch.step import rms_norm

MAX_GATHERED_BYTES = 1 << 21
"""K and V that one gather of decodes copies, if a single context is not more.

On a CPU, pieces that fit its second-level cache take a half to a fifth of the time of large ones.
"""

MAX_PIECE_QUERIES = 256
"""Query tokens of a chunk's piece. Smaller pieces compute less of what causality masks."""

MAX_SCORES = 1 << 24
"""Elements of a piece's mask, or of its scores where they are written out: 64 MiB in float32."""


def paged_attention(
    q_THD: Tensor, cache: KVCache, metadata: AttentionMetadata, spec: AttentionSpec
) -> Tensor:
    """Causal attention of each query token over its sequence's blocks; [T, H, D]."""
    out_THD = torch.empty_like(q_THD)
    out_THD[metadata.query_start[-1] :] = 0  # padding
    # Where a decode may have more tokens than one it is computed as a chunk.
    num_decodes = metadata.num_decodes if metadata.decode_tokens == 1 else 0
    if num_decodes:
        step = _decodes_per_gather(q_THD, cache, max(metadata.seq_lens[:num_decodes]), spec)
        for start in range(0, num_decodes, step):
            part = slice(start, min(start + step, num_decodes))
            out_THD[part] = _decode_attention(q_THD[part], cache, metadata, part, spec)
    for i in range(num_decodes, len(metadata.seq_lens)):
        tokens = slice(metadata.query_start[i], metadata.query_start[i + 1])
        [table_M] = metadata.block_ids(slice(i, i + 1))
        seq_len = metadata.seq_lens[i]
        if seq_len == 0:  # padding
            out_THD[tokens] = 0
            continue
        out_THD[tokens] = _chunk_attention(q_THD[tokens], cache, table_M, seq_len, spec)
    return out_THD


def _num_visible_blocks(seq_len: int, cache: KVCache, spec: AttentionSpec) -> int:
    """The most blocks that the last token of a context of at most `seq_len` can see."""
    block_size = cache.k_NSKD.shape[1]
    num_blocks = -(-seq_len // block_size)
    if not spec.window:
        return num_blocks
    # At worst the window begins with the last slot of a block.
    return min(num_blocks, -(-(spec.window + block_size - 1) // block_size))


def _decodes_per_gather(q_THD: Tensor, cache: KVCache, longest: int, spec: AttentionSpec) -> int:
    num_blocks = _num_visible_blocks(longest, cache, spec)
    block_bytes = 2 * cache.k_NSKD[0].numel() * q_THD.element_size()
    return max(1, MAX_GATHERED_BYTES // (num_blocks * block_bytes))


def _decode_attention(
    q_BHD: Tensor, cache: KVCache, metadata: AttentionMetadata, part: slice, spec: AttentionSpec
) -> Tensor:
    """One query token per sequence; contexts are padded to the longest and masked."""
    block_size = cache.k_NSKD.shape[1]
    num_blocks = _num_visible_blocks(max(metadata.seq_lens[part]), cache, spec)
    seq_len_B1 = metadata.seq_lens_B[part, None]
    table_BM = metadata.block_ids(part)
    position_L = torch.arange(num_blocks * block_size, device=q_BHD.device)
    if spec.window:
        first_B1 = (seq_len_B1 - spec.window).clamp(min=0) // block_size
        column_BM = first_B1 + torch.arange(num_blocks, device=q_BHD.device)
        # Beyond a context's end the table may end too: what is read instead is masked.
        table_BM = table_BM.gather(1, column_BM.clamp(max=table_BM.shape[1] - 1))
        position_BL = first_B1 * block_size + position_L
        mask_BL = (position_BL < seq_len_B1) & (position_BL >= seq_len_B1 - spec.window)
    else:
        table_BM = table_BM[:, :num_blocks]
        mask_BL = position_L < seq_len_B1
    k_BLKD, v_BLKD = (x.flatten(1, 2) for x in gather_kv(cache, table_BM, q_BHD.dtype))
    if q_BHD.is_cpu:
        out_BHD = _attend_decodes(q_BHD, k_BLKD, v_BLKD, mask_BL, spec)
        if out_BHD.isfinite().all():
            return out_BHD
    # What another request left there may be NaN, which a weight of zero does not remove. Elsewhere
    # than on a CPU looking would wait for the device.
    k_BLKD.masked_fill_(~mask_BL[:, :, None, None], 0)
    v_BLKD.masked_fill_(~mask_BL[:, :, None, None], 0)
    return _attend_decodes(q_BHD, k_BLKD, v_BLKD, mask_BL, spec)


def _attend_decodes(
    q_BHD: Tensor, k_BLKD: Tensor, v_BLKD: Tensor, mask_BL: Tensor, spec: AttentionSpec
) -> Tensor:
    # The query heads of a KV head become its query positions: no head is copied.
    q_BKGD = q_BHD.unflatten(1, (k_BLKD.shape[2], -1))
    k_BKLD, v_BKLD, mask_B11L = (
        k_BLKD.transpose(1, 2),
        v_BLKD.transpose(1, 2),
        mask_BL[:, None, None],
    )
    if spec.softcap:
        out_BKGD = softcapped_attention(q_BKGD, k_BKLD, v_BKLD, mask_B11L, spec)
    else:
        out_BKGD = F.scaled_dot_product_attention(
            q_BKGD, k_BKLD, v_BKLD, mask_B11L, scale=spec.scale
        )
    return out_BKGD.flatten(1, 2)


def _chunk_attention(
    q_QHD: Tensor, cache: KVCache, table_M: Tensor, seq_len: int, spec: AttentionSpec
) -> Tensor:
    """The last Q tokens of one sequence, each over itself and those before it."""
    num_queries, num_heads = q_QHD.shape[:2]
    # SDPA takes a mask that all heads share; a softcap needs the scores of every head.
    rows = num_heads if spec.softcap else 1
    visible = min(seq_len, spec.window + MAX_PIECE_QUERIES) if spec.window else seq_len
    step = min(MAX_PIECE_QUERIES, max(1, MAX_SCORES // (rows * visible)))
    out_QHD = torch.empty_like(q_QHD)
    for start in range(0, num_queries, step):
        part = slice(start, min(start + step, num_queries))
        past = seq_len - num_queries
        positions = range(past + part.start, past + part.stop)
        out_QHD[part] = _piece_attention(q_QHD[part], cache, table_M, positions, spec)
    return out_QHD


def _piece_attention(
    q_QHD: Tensor, cache: KVCache, table_M: Tensor, positions: range, spec: AttentionSpec
) -> Tensor:
    """Consecutive query tokens of one sequence, at these positions."""
    block_size, num_kv_heads = cache.k_NSKD.shape[1:3]
    start = max(0, positions.start - spec.window + 1) if spec.window else 0
    first_block = start // block_size
    table_M = table_M[first_block : -(-positions.stop // block_size)]
    visible = slice(start - first_block * block_size, positions.stop - first_block * block_size)
    k_MSKD, v_MSKD = gather_kv(cache, table_M, q_QHD.dtype)
    k_KLD = k_MSKD.flatten(0, 1)[visible].transpose(0, 1)
    v_KLD = v_MSKD.flatten(0, 1)[visible].transpose(0, 1)

    key_L = torch.arange(start, positions.stop, device=q_QHD.device)
    query_Q1 = key_L[positions.start - start :, None]
    mask_QL = key_L <= query_Q1
    if spec.window:
        mask_QL &= key_L > query_Q1 - spec.window
    q_KGQD = q_QHD.unflatten(1, (num_kv_heads, -1)).permute(1, 2, 0, 3)
    group = q_KGQD.shape[1]
    if spec.softcap:
        q_KXD, mask_XL = q_KGQD.flatten(1, 2), mask_QL.repeat(group, 1)
        out_KXD = softcapped_attention(q_KXD, k_KLD, v_KLD, mask_XL, spec)
        out_KGQD = out_KXD.unflatten(1, (group, -1))
    else:
        # The KV heads are a batch, and a group's heads share K, V and the mask without copies.
        k_KGLD = k_KLD[:, None].expand(-1, group, -1, -1)
        v_KGLD = v_KLD[:, None].expand(-1, group, -1, -1)
        out_KGQD = F.scaled_dot_product_attention(q_KGQD, k_KGLD, v_KGLD, mask_QL, scale=spec.scale)
    return out_KGQD.permute(2, 0, 1, 3).flatten(1, 2)


def softcapped_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, spec: AttentionSpec
) -> Tensor:
    """[..., Q, D] queries over [..., L, D] keys and values, in float32, the scores written out.

    mask: bool, broadcast to [..., Q, L]; True may be attended to.
    """
    scores = q.float() @ k.float().transpose(-1, -2)
    scores.mul_(spec.scale / spec.softcap).tanh_().mul_(spec.softcap)
    scores.masked_fill_(~mask, -torch.inf)
    return (scores.softmax(-1) @ v.float()).to(q.dtype)


Write = Callable[[Tensor, Tensor], None]
"""Writes each token's values, [T, ...], to its slot of K, V or scales, [N, S, ...]."""


def store_kv(k_TKD: Tensor, v_TKD: Tensor, cache: KVCache, slot_mapping_T: Tensor) -> None:
    """Write each token's K and V to its slot; slots are distinct, or -1."""
    k_NSKD, v_NSKD = cache.k_NSKD, cache.v_NSKD
    make_writer = repeating_writer
    if slot_mapping_T.device.type == "cpu":
        make_writer = _writer
        keep_T = slot_mapping_T >= 0
        if not keep_T.all():
            k_TKD, v_TKD, slot_mapping_T = k_TKD[keep_T], v_TKD[keep_T], slot_mapping_T[keep_T]
    write = make_writer(slot_mapping_T, k_NSKD.shape[1])
    if cache.k_scale_NSK is not None:
        assert cache.v_scale_NSK is not None
        # K and V at once: for few tokens the number of operations is what counts.
        values, scales = quantize(
            torch.stack((k_TKD, v_TKD)), k_NSKD.dtype, cache.k_scale_NSK.dtype
        )
        write(cache.k_scale_NSK, scales[0])
        write(cache.v_scale_NSK, scales[1])
        k_TKD, v_TKD = values.view(torch.uint8)
        k_NSKD, v_NSKD = k_NSKD.view(torch.uint8), v_NSKD.view(torch.uint8)
    write(k_NSKD, k_TKD)
    write(v_NSKD, v_TKD)


def gather_kv(cache: KVCache, table: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """K and V of the blocks in `table`, int [...], in `dtype`: each [..., S, K, D]."""
    return (
        _gather(cache.k_NSKD, cache.k_scale_NSK, table, dtype),
        _gather(cache.v_NSKD, cache.v_scale_NSK, table, dtype),
    )


def _gather(
    values_NSKD: Tensor, scale_NSK: Tensor | None, table: Tensor, dtype: torch.dtype
) -> Tensor:
    if scale_NSK is None:
        return _blocks(values_NSKD, table)
    bytes_SKD = _blocks(values_NSKD.view(torch.uint8), table)
    values = bytes_SKD.view(values_NSKD.dtype).to(dtype)
    return values.mul_(_blocks(scale_NSK, table).to(dtype)[..., None])


def _blocks(cache: Tensor, table: Tensor) -> Tensor:
    # Copies whole blocks: on a CPU twice as fast as indexing.
    return cache.index_select(0, table.flatten()).unflatten(0, table.shape)


def _places(slot_mapping_T: Tensor, block_size: int) -> tuple[Tensor, Tensor]:
    # Two indices: there is no view of slots as one row, for blocks may lie apart.
    return slot_mapping_T // block_size, slot_mapping_T % block_size


def _writer(slot_mapping_T: Tensor, block_size: int) -> Write:
    places = _places(slot_mapping_T, block_size)

    def write(cache_NS: Tensor, values_T: Tensor) -> None:
        cache_NS[places] = values_T

    return write


def repeating_writer(slot_mapping_T: Tensor, block_size: int) -> Write:
    """Padding repeats the write of the first token that is none, or if all are, writes nothing new.

    Equal writes to one slot may come in any order.
    """
    valid_T = slot_mapping_T >= 0
    own_T = torch.arange(len(valid_T), device=valid_T.device)
    source_T = torch.where(valid_T, own_T, valid_T.int().argmax())
    places = _places(slot_mapping_T[source_T], block_size)
    is_new = valid_T.any()

    def write(cache_NS: Tensor, values_T: Tensor) -> None:
        cache_NS[places] = torch.where(is_new, values_T[source_T], cache_NS[places])

    return write


def rope_and_store_kv(
    qkv: Tensor,
    num_heads: int,
    qk_norm: QKNorm | None,
    rotary: Rotary,
    cache: KVCache,
    metadata: AttentionMetadata,
) -> Tensor:
    num_kv_heads, head_dim = cache.k_NSKD.shape[2:]
    heads = qkv.unflatten(-1, (-1, head_dim))
    q_THD, k_TKD, v_TKD = heads.split((num_heads, num_kv_heads, num_kv_heads), dim=1)
    if qk_norm is not None:
        q_THD = rms_norm(q_THD, qk_norm.q_weight, qk_norm.eps)
        k_TKD = rms_norm(k_TKD, qk_norm.k_weight, qk_norm.eps)
    cos_TR, sin_TR = rotary.cos[metadata.positions_T], rotary.sin[metadata.positions_T]
    store_kv(rope(k_TKD, cos_TR, sin_TR), v_TKD, cache, metadata.slot_mapping_T)
    return rope(q_THD, cos_TR, sin_TR)


def rope(x_THD: Tensor, cos_TR: Tensor, sin_TR: Tensor) -> Tensor:
    """Rotary embedding in the half-split layout; cos and sin of each token, in x's dtype."""
    cos, sin = cos_TR[:, None], sin_TR[:, None]
    first, second, *rest = x_THD.split(cos_TR.shape[-1], dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin, *rest), dim=-1)


class TorchAttention:
    """Implements `AttentionKernels`."""

    block_multiple = 1
    rope_and_store_kv = staticmethod(rope_and_store_kv)
    paged_attention = staticmethod(paged_attention)
