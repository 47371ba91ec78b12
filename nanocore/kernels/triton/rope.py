"""What happens to Q, K and V between their product and attention, in one launch.

Q and K are normed head by head, if the model does so, and turned by their positions (RoFormer: Su
et al. 2021; dimension i of the first half that is turned pairs with i of the second); K and V go to
their slots, quantized if the cache is. A program takes some heads of one token, all of Q, of K or
of V. A head is three pieces, the two halves and what is not turned, for they need not be powers of
two. Computed in float32; rounded where `StepKernels.rms_norm` says, and once after turning.

Q is written over the product, whose memory is at hand, and nothing is allocated. That is safe: only
the thread that writes a number reads it. Each token's results depend on that token alone.
"""

from __future__ import annotations

from typing import Final

import triton
import triton.language as tl
from torch import Tensor

from nanocore.kernels.attention import AttentionMetadata, KVCache, QKNorm, Rotary
from nanocore.kernels.triton.attention_tile import block_offset
from nanocore.kernels.triton.launch import pdl, wait_for_inputs

NUM_WARPS: Final = 4
_HALF_ELEMENTS: Final = NUM_WARPS * 32 * 8
"""Elements of the first halves of a program's heads: 16 bytes for each thread in bfloat16."""

_ROUNDER: Final = tl.constexpr(1.5 * 2**23)
"""Added to a smaller float32 and taken off, it leaves an integer, rounded half to even."""

_SMALLEST_SCALE: Final = tl.constexpr(2.0**-126)


@triton.jit
def _piece(heads, is_head, START: tl.constexpr, SIZE: tl.constexpr, PAD: tl.constexpr,
           HEAD_DIM: tl.constexpr) -> tuple:  # fmt: skip
    """(offsets of SIZE dimensions of each head from START on, which of them there are)."""
    dims = tl.arange(0, PAD)
    offsets = heads[:, None] * HEAD_DIM + (START + dims)[None, :]
    return offsets, is_head[:, None] & (dims < SIZE)[None, :]


@triton.jit
def _load(row, heads, is_head, HEAD_DIM: tl.constexpr, HALF: tl.constexpr, HALF_PAD: tl.constexpr,
          REST: tl.constexpr, REST_PAD: tl.constexpr) -> tuple:  # fmt: skip
    """The three pieces of these heads in float32, zeros where there is nothing."""
    offsets, mask = _piece(heads, is_head, 0, HALF, HALF_PAD, HEAD_DIM)
    first = tl.load(row + offsets, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(row + offsets + HALF, mask=mask, other=0.0).to(tl.float32)
    offsets, mask = _piece(heads, is_head, 2 * HALF, REST, REST_PAD, HEAD_DIM)
    return first, second, tl.load(row + offsets, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _store(row, first, second, rest, heads, is_head, HEAD_DIM: tl.constexpr, HALF: tl.constexpr,
           HALF_PAD: tl.constexpr, REST: tl.constexpr, REST_PAD: tl.constexpr) -> None:  # fmt: skip
    dtype: tl.constexpr = row.dtype.element_ty
    offsets, mask = _piece(heads, is_head, 0, HALF, HALF_PAD, HEAD_DIM)
    tl.store(row + offsets, first.to(dtype), mask=mask)
    tl.store(row + offsets + HALF, second.to(dtype), mask=mask)
    offsets, mask = _piece(heads, is_head, 2 * HALF, REST, REST_PAD, HEAD_DIM)
    tl.store(row + offsets, rest.to(dtype), mask=mask)


@triton.jit
def _times_weight(
    x, weight, dtype: tl.constexpr, SIZE: tl.constexpr, PAD: tl.constexpr
) -> tl.tensor:
    """A normed piece times its weights: rounded to their dtype before and after, then to dtype."""
    dims = tl.arange(0, PAD)
    w = tl.load(weight + dims, mask=dims < SIZE, other=0.0)
    product = x.to(w.dtype).to(tl.float32) * w.to(tl.float32)[None, :]
    return product.to(w.dtype).to(dtype).to(tl.float32)


@triton.jit
def _norm_and_turn(
    first, second, rest, weight, eps, cos_row, sin_row, dtype: tl.constexpr, HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr, HALF_PAD: tl.constexpr, REST: tl.constexpr, REST_PAD: tl.constexpr,
) -> tuple:  # fmt: skip
    """The pieces of heads of Q or K as attention takes them, rounded to dtype."""
    if weight is not None:
        squares = tl.sum(first * first, 1) + tl.sum(second * second, 1) + tl.sum(rest * rest, 1)
        inverse = tl.rsqrt(squares / HEAD_DIM + eps)[:, None]
        first = _times_weight(first * inverse, weight, dtype, HALF, HALF_PAD)
        second = _times_weight(second * inverse, weight + HALF, dtype, HALF, HALF_PAD)
        rest = _times_weight(rest * inverse, weight + 2 * HALF, dtype, REST, REST_PAD)
    dims = tl.arange(0, HALF_PAD)
    cos = tl.load(cos_row + dims, mask=dims < HALF, other=0.0).to(tl.float32)[None, :]
    sin = tl.load(sin_row + dims, mask=dims < HALF, other=0.0).to(tl.float32)[None, :]
    turned = first * cos - second * sin, second * cos + first * sin
    return turned[0].to(dtype).to(tl.float32), turned[1].to(dtype).to(tl.float32), rest


@triton.jit
def _to_bfloat16(x) -> tl.tensor:
    """A finite float32 rounded half to even, in integers: Triton's interpreter would cut it off."""
    bits = x.to(tl.uint32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
    return rounded.to(tl.float32, bitcast=True)


@triton.jit
def _quantized(x, scale, dtype: tl.constexpr) -> tl.tensor:
    scaled = tl.div_rn(x, tl.broadcast_to(scale[:, None], x.shape))
    if dtype == tl.int8:
        scaled = (scaled + _ROUNDER) - _ROUNDER
    return scaled.to(dtype)


@triton.jit
def _store_in_slot(
    cache, scales, slot, first, second, rest, heads, is_head,
    BLOCK_SIZE: tl.constexpr, BLOCK_BYTES: tl.constexpr, KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr, HALF: tl.constexpr, HALF_PAD: tl.constexpr,
    REST: tl.constexpr, REST_PAD: tl.constexpr,
) -> None:  # fmt: skip
    """Write heads of K or V to a slot, int64; quantized as `kv_quantization.quantize` says."""
    dtype: tl.constexpr = cache.dtype.element_ty
    block, place = slot // BLOCK_SIZE, slot % BLOCK_SIZE
    if scales is not None:
        largest = tl.maximum(tl.max(tl.abs(first), 1), tl.max(tl.abs(second), 1))
        largest = tl.maximum(largest, tl.max(tl.abs(rest), 1))
        limit: tl.constexpr = 127.0 if dtype == tl.int8 else 448.0
        scale = _to_bfloat16(tl.div_rn(largest, tl.full(largest.shape, limit, tl.float32)))
        scale = tl.maximum(scale, _SMALLEST_SCALE)
        stored = scale.to(scales.dtype.element_ty)
        of_token = scales + block_offset(scales, block, BLOCK_BYTES) + place * KV_HEADS
        tl.store(of_token + heads, stored, mask=is_head)
        first = _quantized(first, scale, dtype)
        second = _quantized(second, scale, dtype)
        rest = _quantized(rest, scale, dtype)
    row = cache + block_offset(cache, block, BLOCK_BYTES) + place * (KV_HEADS * HEAD_DIM)
    _store(row, first, second, rest, heads, is_head, HEAD_DIM, HALF, HALF_PAD, REST, REST_PAD)


@triton.jit(do_not_specialize_on_alignment=["positions", "slots"])
def rope_and_store_kv_kernel(
    qkv, q_weight, k_weight, cos, sin, k_cache, v_cache, k_scale, v_scale, positions, slots,
    qkv_stride, eps,
    BLOCK_SIZE: tl.constexpr, BLOCK_BYTES: tl.constexpr,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, BLOCK: tl.constexpr, HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr, HALF_PAD: tl.constexpr, REST: tl.constexpr, REST_PAD: tl.constexpr,
    PDL: tl.constexpr,
) -> None:  # fmt: skip
    """Grid: (tokens, blocks of Q's heads + blocks of K's + of V's). Weights are None: no norm."""
    wait_for_inputs(PDL)
    token, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    Q_BLOCKS: tl.constexpr = (HEADS + BLOCK - 1) // BLOCK
    KV_BLOCKS: tl.constexpr = (KV_HEADS + BLOCK - 1) // BLOCK
    row = qkv + token * qkv_stride
    dtype: tl.constexpr = qkv.dtype.element_ty
    position = tl.load(positions + token)
    cos_row, sin_row = cos + position * HALF, sin + position * HALF
    if block < Q_BLOCKS:
        heads = block * BLOCK + tl.arange(0, BLOCK)
        is_head = heads < HEADS
        first, second, rest = _load(row, heads, is_head, HEAD_DIM, HALF, HALF_PAD, REST, REST_PAD)
        first, second, rest = _norm_and_turn(
            first, second, rest, q_weight, eps, cos_row, sin_row, dtype,
            HEAD_DIM, HALF, HALF_PAD, REST, REST_PAD,
        )  # fmt: skip
        _store(row, first, second, rest, heads, is_head, HEAD_DIM, HALF, HALF_PAD, REST, REST_PAD)
    else:
        slot = tl.load(slots + token)
        heads = (block - Q_BLOCKS) % KV_BLOCKS * BLOCK + tl.arange(0, BLOCK)
        is_head = heads < tl.where(slot >= 0, KV_HEADS, 0)
        if block < Q_BLOCKS + KV_BLOCKS:
            k_row = row + HEADS * HEAD_DIM
            first, second, rest = _load(
                k_row, heads, is_head, HEAD_DIM, HALF, HALF_PAD, REST, REST_PAD
            )
            first, second, rest = _norm_and_turn(
                first, second, rest, k_weight, eps, cos_row, sin_row, dtype,
                HEAD_DIM, HALF, HALF_PAD, REST, REST_PAD,
            )  # fmt: skip
            _store_in_slot(
                k_cache, k_scale, slot, first, second, rest, heads, is_head,
                BLOCK_SIZE, BLOCK_BYTES, KV_HEADS, HEAD_DIM, HALF, HALF_PAD, REST, REST_PAD,
            )  # fmt: skip
        else:
            v_row = row + (HEADS + KV_HEADS) * HEAD_DIM
            first, second, rest = _load(
                v_row, heads, is_head, HEAD_DIM, HALF, HALF_PAD, REST, REST_PAD
            )
            _store_in_slot(
                v_cache, v_scale, slot, first, second, rest, heads, is_head,
                BLOCK_SIZE, BLOCK_BYTES, KV_HEADS, HEAD_DIM, HALF, HALF_PAD, REST, REST_PAD,
            )  # fmt: skip


def rope_and_store_kv(
    qkv: Tensor,
    num_heads: int,
    qk_norm: QKNorm | None,
    rotary: Rotary,
    cache: KVCache,
    metadata: AttentionMetadata,
) -> Tensor:
    block_size, num_kv_heads, head_dim = cache.k_NSKD.shape[1:]
    q_weight, k_weight, eps = (
        (None, None, 0.0) if qk_norm is None else (qk_norm.q_weight, qk_norm.k_weight, qk_norm.eps)
    )
    sizes = head_sizes(max(num_heads, num_kv_heads), head_dim, rotary.cos.shape[1])
    blocks = triton.cdiv(num_heads, sizes["BLOCK"]) + 2 * triton.cdiv(num_kv_heads, sizes["BLOCK"])
    assert qkv.stride(1) == 1
    if len(qkv):
        rope_and_store_kv_kernel[(len(qkv), blocks)](
            qkv, q_weight, k_weight, rotary.cos, rotary.sin, cache.k_NSKD, cache.v_NSKD,
            cache.k_scale_NSK, cache.v_scale_NSK, metadata.positions_T, metadata.slot_mapping_T,
            qkv.stride(0), eps,
            BLOCK_SIZE=block_size, BLOCK_BYTES=cache.block_bytes,
            HEADS=num_heads, KV_HEADS=num_kv_heads, **sizes, num_warps=NUM_WARPS, **pdl(qkv.device),
        )  # fmt: skip
    return qkv[:, : num_heads * head_dim].unflatten(1, (num_heads, head_dim))


def head_sizes(num_heads: int, head_dim: int, half: int) -> dict[str, int]:
    """The kernel's constants about heads; half: half of the dimensions that are turned."""
    half_pad, rest = triton.next_power_of_2(half), head_dim - 2 * half
    block = min(max(1, _HALF_ELEMENTS // half_pad), triton.next_power_of_2(num_heads))
    return {
        "BLOCK": block, "HEAD_DIM": head_dim, "HALF": half, "HALF_PAD": half_pad,
        "REST": rest, "REST_PAD": triton.next_power_of_2(max(1, rest)),
    }  # fmt: skip
