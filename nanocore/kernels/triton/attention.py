"""Attention over the paged cache: decodes by one kernel and chunks by another, and their shapes.

What is launched follows from padded sizes and from what the host knows at capture, so a CUDA graph
replays it for any step that fits; long contexts are split by what only the device knows, see
`decode_plan` and `attention_plan`. Batch-invariant, all tokens go through the kernel of chunks,
unsplit, in tiles of one shape: what a token gets then never depends on how its tokens came, or
beside whom. Shapes were chosen by what fits a multiprocessor, and for bfloat16 by what an H100 was
fastest with; `DecodeTiles` and `PrefillTiles` are arguments of the kernels' own functions, so that
others can be tried. Shape suffixes: see `interface`.
"""

from __future__ import annotations

from functools import cache as remember
from typing import Final

import torch
import triton
from torch import Tensor

from nanocore.kernels.interface import AttentionMetadata, AttentionSpec, KVCache
from nanocore.kernels.triton.decode_attention import DecodeTiles, decode_attention
from nanocore.kernels.triton.prefill_attention import PrefillTiles, prefill_attention

_LARGE_SHARED_MEMORY: Final = ((8, 0), (9, 0), (10, 0), (10, 3))
"""Compute capabilities of data centers: 163 KiB or more a program, where others have 99."""


def paged_attention(
    q_THD: Tensor,
    cache: KVCache,
    metadata: AttentionMetadata,
    spec: AttentionSpec,
    *,
    num_sms: int,
    batch_invariant: bool,
) -> Tensor:
    """See `interface.Kernels.paged_attention`. q_THD may have gaps between tokens.

    Padding within the step, sequences of length 0, gets zeros from the kernels.
    """
    assert spec.scale > 0, f"the greatest of scaled scores is sought unscaled: {spec.scale}"
    assert q_THD.stride()[1:] == (q_THD.shape[2], 1), q_THD.stride()
    out_THD = torch.empty(q_THD.shape, dtype=q_THD.dtype, device=q_THD.device)
    num_tokens, num_decodes = metadata.query_start[-1], metadata.num_decodes
    if num_tokens < len(out_THD):
        out_THD[num_tokens:] = 0
    head_dim, capability = q_THD.shape[2], _capability(q_THD.device)
    num_kv_heads = cache.k_NSKD.shape[2]
    num_shares = 1 if batch_invariant else choose_num_shares(num_kv_heads, num_sms)
    if num_decodes and not batch_invariant:
        tiles = decode_tiles(head_dim, cache.k_NSKD.itemsize, capability)
        num_programs = choose_num_programs(num_decodes, num_kv_heads, num_sms, tiles.per_sm)
        decode_attention(q_THD, cache, metadata, spec, out_THD, tiles, num_programs)
    if num_tokens > (0 if batch_invariant else num_decodes):
        # In a step to be replayed all could be chunks, as the host's bounds tell: see
        # `HostBounds.of_shape`. In others decodes are apart, and programs for them would cost time.
        is_apart = not batch_invariant and metadata.query_start[num_decodes] == num_decodes
        apart = num_decodes if is_apart else 0
        prefill_attention(
            q_THD,
            cache,
            metadata,
            spec,
            out_THD,
            prefill_tiles(
                head_dim,
                q_THD.itemsize,
                capability,
                is_plain=cache.k_NSKD.dtype == q_THD.dtype and cache.k_NSKD.shape[1] % 64 == 0,
            ),
            num_shares,
            max_tokens=num_tokens - apart,
            max_seqs=len(metadata.seq_lens) - apart,
            has_decodes=batch_invariant,
        )
    return out_THD


def choose_num_shares(num_kv_heads: int, num_sms: int) -> int:
    """Number of shares of what a KV head's chunks read: two a multiprocessor, in all KV heads."""
    return max(1, 2 * num_sms // num_kv_heads)


def choose_num_programs(max_seqs: int, num_kv_heads: int, num_sms: int, per_sm: int) -> int:
    """Number of programs for the decodes of a KV head.

    As many as multiprocessors hold at once, or as many as there are sequences where these are more:
    programs then begin as others end, and most of them have a sequence for themselves.
    """
    return max(1, per_sm * num_sms // num_kv_heads, max_seqs)


def decode_tiles(head_dim: int, cache_itemsize: int, capability: tuple[int, int]) -> DecodeTiles:
    """By the bytes of a token's K or V in a head.

    A block's id is loaded as far ahead of its K and V as these are of their use: of n stages,
    (n - 1) / 2 tiles of K and as many of V are in flight. With 5, and 16 KiB a tile, two programs
    on each multiprocessor of an H100 read 32 contexts of 1,024 tokens in 51 us, and three in 58 us;
    FlashAttention 3 takes 60 us. Quantized ones an H200 read in 39 us by 128 keys, and in 45 us by
    64. Wide heads that are quantized take more memory, for what they are converted to.
    """
    width = triton.next_power_of_2(head_dim)
    is_large = capability in _LARGE_SHARED_MEMORY
    most_keys = 128 if cache_itemsize == 1 and is_large and capability >= (9, 0) else 64
    keys = max(16, min(most_keys, 16384 // (width * cache_itemsize)))
    is_narrow = cache_itemsize > 1 or width <= 128 or (is_large and capability >= (9, 0))
    per_sm = 2 if is_narrow else 1
    return DecodeTiles(keys, num_warps=4, num_stages=5 if is_large else 3, per_sm=per_sm)


def prefill_tiles(
    head_dim: int, itemsize: int, capability: tuple[int, int], *, is_plain: bool
) -> PrefillTiles:
    """One shape for all steps, so that how a prompt is chunked never changes a bit of it.

    Hopper's matrix instructions take 64 rows for each four warps. Of programs of 64 rows two fit a
    multiprocessor: one's products go on beside the other's softmax. In float32 there are no such
    instructions: small tiles, for a result to check others by.

    is_plain: K and V are of q's dtype, in blocks of whole tiles.
    """
    is_large = capability in _LARGE_SHARED_MEMORY
    if itemsize == 4:
        return PrefillTiles(rows=16, keys=16, num_warps=4, num_stages=2)
    if head_dim > 128:
        return PrefillTiles(rows=64, keys=64 if is_large else 32, num_warps=8, num_stages=3)
    if capability < (9, 0) or not is_large:
        return PrefillTiles(rows=64, keys=32, num_warps=4, num_stages=3)
    # On an H100 two stages are 3 to 5 % faster than three, and than tiles of 128 rows or keys.
    num_stages = 2 if is_plain and head_dim > 64 else 3
    return PrefillTiles(rows=64, keys=64, num_warps=4, num_stages=num_stages)


@remember
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (9, 0)
