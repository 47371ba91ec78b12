"""Attention as the backend launches it, for the compiler."""

from __future__ import annotations

from typing import Any, Final

from triton import next_power_of_2

from nanocore.kernels.triton import attention_plan, decode_attention
from nanocore.kernels.triton.attention_plan import attention_plan_kernel, merge_parts_kernel
from nanocore.kernels.triton.decode_attention import decode_attention_kernel, decode_rows
from nanocore.kernels.triton.paged_attention import (
    PrefillTiles,
    decode_tiles,
    prefill_attention_kernel,
    prefill_tiles,
)
from tests.kernels.triton.block_constants import block_constants
from tests.kernels.triton.compilation import CAPABILITIES, SHARED_BYTES, Case

_BYTES = {"*bf16": 2, "*fp16": 2, "*i8": 1, "*fp8e4nv": 1, "*fp32": 4}
_QUANTIZED = {"*i8": "int8", "*fp8e4nv": "fp8"}
_HOPPER = (9, 0)
_KV_HEADS = 8
_EVERYWHERE = (
    "decode", "decode, head dim 256, window, softcap", "merge of chunks", "plan of decodes",
    "plan of chunks, window", "prefill", "prefill, blocks of 16",
    "prefill, head dim 256, window, softcap",
)  # fmt: skip
"""The others are for Hopper, where time is short."""

_METADATA = ("block_table", "query_start", "seq_lens", "num_decodes")
"""Of these the kernels do not know where in memory they begin."""


_STEP: Final = {
    "parts": "*i32", "block_table": "*i32", "q_stride": "i32", "table_stride": "i32",
}  # fmt: skip
_RESERVED_BYTES: Final = 1 << 10
"""Of a multiprocessor's shared memory, for each program."""


def _sums(can_split: bool) -> dict[str, str | None]:
    return dict.fromkeys(("sums", "log_sums"), "*fp32" if can_split else None)


def cases() -> list[Case]:
    return [
        _decode("decode"),
        _decode("decode, few", is_few=True),
        _decode("decode, group of 4", group=4),
        _decode("decode, blocks of 16", block_size=16),
        _decode("decode, head dim 64", head_dim=64),
        _decode("decode, head dim 96", head_dim=96),
        _decode("decode, head dim 256, window, softcap", head_dim=256, window=512, softcap=50.0),
        _decode("decode, 4 tokens", queries=4, group=4),
        _decode("decode, 5 tokens, few, blocks of 16", queries=5, is_few=True, block_size=16),
        _decode("decode, 8 tokens, group of 8", queries=8, group=8),
        _decode("decode, 8 tokens, head dim 256, window", queries=8, head_dim=256, window=512),
        _decode(
            "decode, 4 tokens of 256, int8 cache", queries=4, group=8, head_dim=256, cache="*i8"
        ),
        *(
            _decode(
                f"decode, 8 tokens of 128, {_QUANTIZED[cache]} cache",
                queries=8,
                group=4,
                cache=cache,
            )
            for cache in _QUANTIZED
        ),
        _decode(
            "decode, 8 tokens, for 80", queries=8, group=8, tiles_of=(8, 0), capabilities=(80,)
        ),
        _decode(
            "decode, 8 tokens, for 89", queries=8, group=8, tiles_of=(8, 9), capabilities=(89,)
        ),
        _decode("decode, float32", dtype="*fp32"),
        _decode("decode, float16", dtype="*fp16"),
        _merge("merge of few decodes", group=2, queries=1, block_rows=1),
        _merge("merge of few decodes of 4 tokens", group=2, queries=4, block_rows=1),
        _merge("merge of chunks", group=5, queries=8, block_rows=4),
        _merge("merge of chunks, head dim 96", group=2, queries=32, block_rows=4, head_dim=96),
        _merge("merge of chunks, head dim 256", group=2, queries=32, block_rows=4, head_dim=256),
        _decode_plan("plan of decodes"),
        _decode_plan("plan of few decodes, window", window=512, is_few=True),
        _decode_plan("plan of decodes of 4 tokens", queries=4),
        _decode_plan("plan of few decodes of 4 tokens, window", queries=4, window=512, is_few=True),
        _plan("plan of chunks", queries=32),
        _plan("plan of chunks, window", queries=16, window=512),
        _plan("plan of all as chunks, batch-invariant", queries=32, is_invariant=True),
        _prefill("prefill"),
        _prefill("prefill, batch-invariant", can_split=False),
        _prefill("prefill, tiles of 128 rows", tiles=PrefillTiles(128, 64, 8, 3)),
        _prefill("prefill, window", window=512),
        _prefill("prefill, group of 5", group=5),
        _prefill("prefill, blocks of 16", block_size=16),
        _prefill("prefill, head dim 64", head_dim=64),
        _prefill("prefill, head dim 96", head_dim=96),
        _prefill("prefill, head dim 256, window, softcap", head_dim=256, window=512, softcap=50.0),
        _prefill("prefill, float32", dtype="*fp32"),
        _prefill("prefill, float16", dtype="*fp16"),
        *(case for cache in _QUANTIZED for case in _quantized(cache)),
    ]


def _quantized(cache: str) -> list[Case]:
    others = [(100, _HOPPER), (80, (8, 0)) if cache == "*i8" else (89, (8, 9))]
    shapes: dict[str, dict[str, Any]] = {
        f"head dim {head_dim}": {"head_dim": head_dim}
        for head_dim in (64, 80, 96, 112, 128, 192, 256)
    }
    shapes["head dim 256, window, softcap"] = {"head_dim": 256, "window": 512, "softcap": 50.0}
    shapes["blocks of 16"] = {"block_size": 16}
    shapes["float16"] = {"dtype": "*fp16"}
    for head_dim in (128, 256):
        for number, tiles_of in others:
            shapes[f"head dim {head_dim}, for {number}"] = {
                "head_dim": head_dim, "tiles_of": tiles_of, "capabilities": (number,),
            }  # fmt: skip
    return [
        make(
            f"{kind}, {_QUANTIZED[cache]} cache, {name}",
            cache=cache,
            **({"capabilities": (90,)} | shape),
        )
        for kind, make in (("decode", _decode), ("prefill", _prefill))
        for name, shape in shapes.items()
    ]


def _spec(head_dim: int, window: int, softcap: float) -> dict[str, Any]:
    return {
        "SCALE": head_dim**-0.5, "WINDOW": window, "SOFTCAP": softcap, "KV_HEADS": _KV_HEADS,
        "HEAD_DIM": head_dim, "HEAD_DIM_PAD": next_power_of_2(head_dim),
    }  # fmt: skip


def _case(
    name: str,
    kernel: Any,
    arguments: dict[str, str | None],
    constexprs: dict[str, Any],
    num_warps: int,
    num_stages: int,
    **wanted: Any,
) -> Case:
    signature = {name: kind for name, kind in arguments.items() if kind is not None}
    return Case(
        name=name,
        kernel=kernel,
        signature=signature,
        constexprs=constexprs | dict.fromkeys(arguments.keys() - signature.keys()),
        num_warps=num_warps,
        num_stages=num_stages,
        aligned=tuple(
            name
            for name, kind in signature.items()
            if name == "q_stride" or (kind[0] == "*" and name not in _METADATA)
        ),
        **({"capabilities": CAPABILITIES if name in _EVERYWHERE else (90,)} | wanted),
    )


def _decode(
    name: str,
    *,
    dtype: str = "*bf16",
    cache: str | None = None,
    group: int = 2,
    head_dim: int = 128,
    block_size: int = 64,
    window: int = 0,
    softcap: float = 0.0,
    queries: int = 1,
    is_few: bool = False,
    tiles_of: tuple[int, int] = _HOPPER,
    **options: Any,
) -> Case:
    cache, group_pad = cache or dtype, next_power_of_2(group)
    scale = "*fp32" if cache in _QUANTIZED else None
    num_rows = decode_rows(queries, group)
    tiles = decode_tiles(head_dim, _BYTES[cache], tiles_of, num_rows if queries > 1 else 0)
    arguments = {
        "q": dtype, "k_cache": cache, "v_cache": cache, "k_scale": scale, "v_scale": scale,
        "out": dtype, **_sums(True), "arrivals": None if is_few else "*i32",
        "first_parts": "*i32", **_STEP,
        "query_start": "*i32" if queries > 1 else None,
        "num_seqs": "i32" if queries > 1 else None, "num_tokens": "i32" if queries > 1 else None,
    }  # fmt: skip
    product = "mma.sync" if num_rows < 64 else "mma"  # Hopper's own takes 64 rows
    constexprs = {"GROUP": group, "GROUP_PAD": group_pad, "QUERIES": queries, "ROWS": num_rows}
    constexprs |= {"TILE": tiles.keys, "MERGED_PARTS": attention_plan.MERGE_BLOCK // group_pad}
    constexprs |= _spec(head_dim, window, softcap)
    constexprs |= block_constants(cache, _KV_HEADS, head_dim, block_size)
    return _case(
        name,
        decode_attention_kernel,
        arguments,
        constexprs,
        tiles.num_warps,
        tiles.num_stages,
        instructions={} if dtype == "*fp32" else dict.fromkeys((80, 89, 90, 100), product),
        # As many programs as are to be on a multiprocessor at once do fit it.
        max_shared_bytes=SHARED_BYTES[10 * tiles_of[0] + tiles_of[1]] // tiles.per_sm
        - _RESERVED_BYTES,
        # What the loop over parts keeps is put away while one is read.
        max_spill_bytes=32,
        **options,
    )


def _merge(name: str, *, group: int, queries: int, block_rows: int, head_dim: int = 128) -> Case:
    arguments: dict[str, str | None] = {
        "sums": "*fp32", "log_sums": "*fp32", "merges": "*i32", "out": "*bf16", "max_merges": "i32",
    }  # fmt: skip
    constexprs = {
        "KV_HEADS": _KV_HEADS, "GROUP": group, "QUERIES": queries, "HEAD_DIM": head_dim,
        "HEAD_DIM_PAD": next_power_of_2(head_dim), "BLOCK_ROWS": block_rows,
        "BLOCK_PARTS": attention_plan.MERGE_BLOCK // block_rows,
    }  # fmt: skip
    return _case(name, merge_parts_kernel, arguments, constexprs, 4, 3)


def _decode_plan(name: str, *, window: int = 0, is_few: bool = False, queries: int = 1) -> Case:
    block = decode_attention.FEW_BLOCK if is_few else decode_attention.PLAN_BLOCK
    arguments: dict[str, str | None] = {
        "query_start": "*i32" if queries > 1 else None,
        "seq_lens": "*i32", "num_decodes": "*i32", "parts": "*i32", "first_parts": "*i32",
        "arrivals": None if is_few else "*i32", "merges": "*i32" if is_few else None,
        "num_programs": "i32", "num_arrivals": "i32", "max_merges": "i32",
    }  # fmt: skip
    constexprs = {"WINDOW": window, "TILE": 64, "BLOCK": block}
    num_warps = 1 if is_few else 8
    return _case(name, decode_attention.decode_plan_kernel, arguments, constexprs, num_warps, 3)


def _plan(name: str, *, queries: int, window: int = 0, is_invariant: bool = False) -> Case:
    arguments = {
        "query_start": "*i32", "seq_lens": "*i32", "num_decodes": None if is_invariant else "*i32",
        "parts": "*i32", "merges": None if is_invariant else "*i32",
        "num_seqs": "i32", "num_shares": "i32", "min_tiles": "i32", "max_parts": "i32",
        "max_merges": "i32",
    }  # fmt: skip
    constexprs = {
        "QUERIES": queries, "WINDOW": window, "TILE": 64, "BLOCK": attention_plan.PLAN_BLOCK
    }  # fmt: skip
    return _case(name, attention_plan_kernel, arguments, constexprs, 8, 3)


def _prefill(
    name: str,
    *,
    dtype: str = "*bf16",
    cache: str | None = None,
    group: int = 2,
    head_dim: int = 128,
    block_size: int = 64,
    window: int = 0,
    softcap: float = 0.0,
    can_split: bool = True,
    tiles: PrefillTiles | None = None,
    tiles_of: tuple[int, int] = _HOPPER,
    **options: Any,
) -> Case:
    cache, group_pad = cache or dtype, next_power_of_2(group)
    scale = "*fp32" if cache in _QUANTIZED else None
    is_plain = scale is None and block_size % 64 == 0
    tiles = tiles or prefill_tiles(head_dim, _BYTES[dtype], tiles_of, is_plain=is_plain)
    arguments = {
        "q": dtype, "k_cache": cache, "v_cache": cache, "k_scale": scale, "v_scale": scale,
        "out": dtype, **_sums(can_split), **_STEP,
    }  # fmt: skip
    constexprs = {"GROUP": group, "GROUP_PAD": group_pad, "QUERIES": tiles.rows // group_pad}
    constexprs |= _spec(head_dim, window, softcap) | {"TILE": tiles.keys}
    constexprs |= block_constants(cache, _KV_HEADS, head_dim, block_size)
    tensor_cores = {80: "mma.sync", 89: "mma.sync", 90: "wgmma.mma_async", 100: "tcgen05.mma"}
    return _case(
        name,
        prefill_attention_kernel,
        arguments,
        constexprs,
        tiles.num_warps,
        tiles.num_stages,
        instructions={} if dtype == "*fp32" else tensor_cores,
        # Two stages leave a tile's one block id to be waited for, which is faster all the same.
        num_early_loads=int(tiles.num_stages == 2),
        # At head dims above 128 K, V and what they are converted to fill all registers.
        max_spill_bytes=112 if cache in _QUANTIZED and head_dim > 128 else 16,
        **options,
    )
