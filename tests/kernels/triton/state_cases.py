"""Layers with states as the backend launches them, for the compiler."""

from __future__ import annotations

from typing import Any, Final

from triton import next_power_of_2

from nanocore.kernels.triton import states
from tests.kernels.triton.compilation import Case, give_if

_STEP: Final = {
    "block_table": "*i32", "query_start": "*i32", "seq_lens": "*i32", "num_seqs": "i32",
    "num_tokens": "i32", "table_stride": "i32",
}  # fmt: skip
"""Of these the kernels do not know where in memory they begin, or whether they divide by 16."""
_DRAFTS: Final = {
    "drafts": "*bf16", "rows_b": "*i64", "num_right": "*i32", "num_drafts": "*i32",
    "row_stride": "i32", "draft_stride": "i32",
}  # fmt: skip
_UNALIGNED: Final = {*_STEP, "rows_b", "num_right", "num_drafts", "eps"}
_EVERYWHERE: Final = (80, 89, 90, 100)
_HOPPER: Final = (90,)


def cases() -> list[Case]:
    """The delta rule's sizes are those of Qwen3.5-0.8B, 4B and 27B; a convolution is LFM2's."""
    return [
        _conv("silu conv, decodes", 6144, states.CONV_TILES[0], capabilities=_EVERYWHERE),
        _conv("silu conv, chunks", 6144, states.CONV_TILES[1], capabilities=_EVERYWHERE),
        _conv("silu conv of 4B, decodes", 8192, states.CONV_TILES[0]),
        _conv("silu conv of 4B, chunks", 8192, states.CONV_TILES[1]),
        _conv("short conv, decodes", 2048, states.CONV_TILES[0], num_taps=3, has_products=True),
        _conv("short conv, chunks", 2048, states.CONV_TILES[1], num_taps=3, has_products=True),
        _conv("silu conv, 8 taps, bias, decodes", 1000, states.CONV_TILES[0], 8, has_bias=True),
        _conv("silu conv, 8 taps, bias, chunks", 1000, states.CONV_TILES[1], 8, has_bias=True),
        _conv("silu conv, decodes, drafts", 6144, states.CONV_TILES[0], has_drafts=True),
        _conv("silu conv, chunks, drafts", 6144, states.CONV_TILES[1], has_drafts=True),
        _delta("delta rule of 0.8B, drafts", (16, 16), has_drafts=True),
        _delta("delta rule of 4B, drafts", (16, 32), has_drafts=True),
        _keep_drafts("kept drafts"),
        _delta("delta rule of 0.8B", (16, 16), capabilities=_EVERYWHERE),
        _delta("delta rule of 4B", (16, 32)),
        _delta("delta rule of 4B, tiled", (16, 32), is_tiled=True),
        _delta("delta rule of 27B, blocks of 64", (16, 48), block_size=64),
        _delta("delta rule, float32", (16, 32), dtype="*fp32"),
        _delta("delta rule, key dim 48, value dim 80", (4, 8), (48, 80)),
        _delta("delta rule, key dim 64", (16, 32), (64, 64)),
        _delta("delta rule, key dim 256", (16, 32), (256, 256)),
        _gated_norm("gated norm"),
        _sigmoid_gate("sigmoid gate"),
        *_mtp_cases(5120),
    ]


def _conv(
    name: str,
    num_channels: int,
    tile: tuple[int, int],
    num_taps: int = 4,
    *,
    has_products: bool = False,
    has_bias: bool = False,
    has_drafts: bool = False,
    capabilities: tuple[int, ...] = _HOPPER,
) -> Case:
    signature = {
        "x": "*bf16", "weight": "*fp32", "states": "*bf16", **_STEP, "out": "*bf16",
        "x_stride": "i32", "block_stride": "i32",
    }  # fmt: skip
    constexprs: dict[str, Any] = {
        "CHANNELS": num_channels, "TAPS": num_taps, "TAPS_PAD": next_power_of_2(num_taps),
        "BLOCK_SIZE": 16, "HAS_PRODUCTS": has_products, "TILE_T": tile[0], "TILE_C": tile[1],
    }  # fmt: skip
    give_if(has_bias, {"bias": "*fp32"}, signature, constexprs)
    give_if(has_drafts, _DRAFTS, signature, constexprs)
    return _case(name, states.short_conv_kernel, signature, constexprs, capabilities=capabilities)


def _delta(
    name: str,
    heads: tuple[int, int],
    dims: tuple[int, int] = (128, 128),
    *,
    block_size: int = 16,
    is_tiled: bool = False,
    dtype: str = "*bf16",
    has_drafts: bool = False,
    capabilities: tuple[int, ...] = _HOPPER,
) -> Case:
    """heads: of keys, of values. dims: likewise."""
    signature = {
        "qkv": dtype, "gates": dtype, "decay": "*fp32", "time_bias": "*fp32", "states": "*fp32",
        **_STEP, "out": dtype, "qkv_stride": "i32", "gate_stride": "i32", "block_stride": "i32",
    }  # fmt: skip
    tile_k, tile_v = states.delta_tile(*dims)
    constexprs: dict[str, Any] = {
        "KEY_HEADS": heads[0], "VALUE_HEADS": heads[1], "KEY_DIM": dims[0], "VALUE_DIM": dims[1],
        "IS_TILED": is_tiled, "BLOCK_SIZE": block_size, "TILE_K": tile_k, "TILE_V": tile_v,
    }  # fmt: skip
    give_if(has_drafts, _DRAFTS, signature, constexprs)
    return _case(
        name, states.delta_rule_kernel, signature, constexprs, num_warps=states.DELTA_WARPS,
        max_registers=states.DELTA_REGISTERS, capabilities=capabilities,
    )  # fmt: skip


def _keep_drafts(name: str) -> Case:
    signature = {name: kind for name, kind in _DRAFTS.items() if name != "num_right"}
    signature |= {"x": "*bf16", "query_start": "*i32", "x_stride": "i32", "size": "i32"}
    return _case(name, states.keep_drafts_kernel, signature, {"BLOCK": 1024})


def _gated_norm(name: str) -> Case:
    signature = {
        "x": "*bf16", "gate": "*bf16", "weight": "*bf16", "out": "*bf16", "eps": "fp32",
        "gate_stride": "i32",
    }  # fmt: skip
    constexprs = {"HEADS": 32, "DIM": 128, "TILE": 128}
    return _case(name, states.gated_norm_kernel, signature, constexprs, num_warps=1)


def _sigmoid_gate(name: str) -> Case:
    signature = {"x": "*bf16", "gate": "*bf16", "out": "*bf16", "size": "i32", "gate_stride": "i32"}
    return _case(name, states.sigmoid_gate_kernel, signature, {"BLOCK": 1024})


def _mtp_cases(size: int) -> list[Case]:
    sizes, step = {"size": "i32", "row_stride": "i32"}, {"query_start": "*i32", "rows_b": "*i64"}
    of_rows = {"kept": "*bf16", **step, **sizes}
    tile = {"TILE": next_power_of_2(size)}
    kinds = {"x": "*bf16", "hidden": "*bf16", "out": "*bf16", "size": "i32"}
    joined = of_rows | {"num_right": "*i32", "out": "*bf16"}
    kept = of_rows | {"num_drafts": "*i32", "hidden": "*bf16"}
    return [
        _case("joined rows", states.join_previous_kernel, kinds, {"BLOCK": 1024}),
        _case("joined first rows", states.join_kept_kernel, joined, tile, num_warps=8),
        _case("kept rows", states.keep_last_kernel, kept, tile, num_warps=8),
    ]


def _case(
    name: str, kernel: Any, signature: dict[str, str], constexprs: dict[str, Any], **options: Any
) -> Case:
    """Nothing may be spilled: a delta rule would, in every token."""
    aligned = tuple(name for name in signature if name not in _UNALIGNED)
    return Case(
        name=name, kernel=kernel, signature=signature, constexprs=constexprs, aligned=aligned,
        max_spill_bytes=0, **options,
    )  # fmt: skip
