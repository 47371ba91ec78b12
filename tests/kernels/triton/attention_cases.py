"""Attention as the backend launches it, for the compiler."""

from __future__ import annotations

from typing import Any

from triton import next_power_of_2

from nanocore.kernels.triton.attention import decode_tiles, prefill_tiles
from nanocore.kernels.triton.decode_attention import (
    MIN_DOT_ROWS,
    decode_attention_kernel,
    merge_splits_kernel,
)
from nanocore.kernels.triton.prefill_attention import prefill_attention_kernel
from tests.kernels.triton.compilation import Case

_BYTES = {"*bf16": 2, "*fp16": 2, "*i8": 1, "*fp32": 4}
_HOPPER = (9, 0)
_KV_HEADS = 8
_METADATA = ("block_table", "query_start", "seq_lens", "num_decodes")
"""Of these the kernels do not know where in memory they begin."""


def cases() -> list[Case]:
    return [
        _decode("decode"),
        _decode("decode, splits", splits=True),
        _decode("decode, group of 4", group=4),
        _decode("decode, blocks of 16", block_size=16),
        _decode("decode, head dim 64", head_dim=64),
        _decode("decode, head dim 96", head_dim=96),
        _decode("decode, head dim 256, window, softcap", head_dim=256, window=512, softcap=50.0),
        _decode("decode, int8 cache", cache="*i8"),
        _decode("decode, float32", dtype="*fp32"),
        _decode("decode, float16", dtype="*fp16"),
        _merge("merge of splits"),
        _prefill("prefill"),
        _prefill("prefill of all, batch-invariant", splits_off_decodes=False),
        _prefill("prefill, group of 5", group=5),
        _prefill("prefill, blocks of 16", block_size=16),
        _prefill("prefill, head dim 64", head_dim=64),
        _prefill("prefill, head dim 96", head_dim=96),
        _prefill("prefill, head dim 256, window, softcap", head_dim=256, window=512, softcap=50.0),
        _prefill("prefill, int8 cache", cache="*i8"),
        _prefill("prefill, float32", dtype="*fp32"),
        _prefill("prefill, float16", dtype="*fp16"),
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
        **wanted,
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
    splits: bool = False,
) -> Case:
    cache = cache or dtype
    scale = "*bf16" if cache == "*i8" else None
    tiles = decode_tiles(head_dim, _BYTES[cache], _HOPPER)
    arguments = {
        "q": dtype, "k_cache": cache, "v_cache": cache, "k_scale": scale, "v_scale": scale,
        "out": "*fp32" if splits else dtype, "log_sums": "*fp32" if splits else None,
        "block_table": "*i32", "seq_lens": "*i32", "num_decodes": "*i32",
        "q_stride": "i32", "table_stride": "i32",
    }  # fmt: skip
    constexprs = {"GROUP": group, "ROWS": MIN_DOT_ROWS, "BLOCK_SIZE": block_size}
    constexprs |= _spec(head_dim, window, softcap) | {"TILE": tiles.keys}
    return _case(
        name, decode_attention_kernel, arguments, constexprs, tiles.num_warps, tiles.num_stages,
        instructions={} if dtype == "*fp32" else dict.fromkeys((80, 90, 100), "mma.sync"),
    )  # fmt: skip


def _merge(name: str) -> Case:
    arguments: dict[str, str | None] = {
        "parts": "*fp32", "log_sums": "*fp32", "out": "*bf16", "num_decodes": "*i32",
        "num_splits": "i32",
    }  # fmt: skip
    constexprs = {"HEAD_DIM": 128, "HEAD_DIM_PAD": 128, "SPLITS_PAD": 32}
    return _case(name, merge_splits_kernel, arguments, constexprs, 4, 3)


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
    splits_off_decodes: bool = True,
) -> Case:
    cache, group_pad = cache or dtype, next_power_of_2(group)
    scale = "*bf16" if cache == "*i8" else None
    tiles = prefill_tiles(head_dim, _BYTES[dtype], _HOPPER)
    arguments = {
        "q": dtype, "k_cache": cache, "v_cache": cache, "k_scale": scale, "v_scale": scale,
        "out": dtype, "block_table": "*i32", "query_start": "*i32", "seq_lens": "*i32",
        "num_decodes": "*i32" if splits_off_decodes else None,
        "num_seqs": "i32", "q_stride": "i32", "table_stride": "i32",
    }  # fmt: skip
    constexprs = {"GROUP": group, "GROUP_PAD": group_pad, "QUERIES": tiles.rows // group_pad}
    constexprs |= _spec(head_dim, window, softcap) | {"BLOCK_SIZE": block_size, "TILE": tiles.keys}
    tensor_cores = {80: "mma.sync", 90: "wgmma.mma_async", 100: "tcgen05.mma"}
    return _case(
        name, prefill_attention_kernel, arguments, constexprs, tiles.num_warps, tiles.num_stages,
        instructions={} if dtype == "*fp32" else tensor_cores,
    )  # fmt: skip
