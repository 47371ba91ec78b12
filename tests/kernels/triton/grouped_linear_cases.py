"""Linear layers of grouped weights as the backend launches them, for the compiler."""

from __future__ import annotations

from dataclasses import dataclass

from nanocore.kernels.triton.grouped_linear import (
    FLOAT32_TILE,
    GroupedTile,
    choose_tile,
    grouped_linear_kernel,
)
from nanocore.kernels.triton.grouped_packing import Layout
from nanocore.kernels.triton.grouped_rows import BLOCK_R, NUM_WARPS, constants, grouped_rows_kernel
from tests.kernels.triton.compilation import SHARED_BYTES, Case

LAYOUTS = {
    "groups of 128": Layout(4, 64, 2, "float16"),
    "groups of 128 with zeros": Layout(4, 64, 2, "float16", has_zeros=True),
    "groups of 32": Layout(4, 32, 4, "float16"),
    "bfloat16 groups of 64": Layout(4, 64, 4, "bfloat16", has_zeros=True),
    "Q4_K": Layout(4, 32, 4, "super", has_minima=True),
    "minima": Layout(4, 32, 4, "float32", has_minima=True),
    "8 bits": Layout(8, 64, 2, "float16"),
    "Q6_K": Layout(8, 16, 2, "super"),
    "float8": Layout(8, 64, 2, "float32", is_float8=True),
}
"""What checkpoints have."""

ROWS = (1, 17, 64, 65)
COLUMNS = (1024, 6144, 24576)
"""About where tiles change."""


@dataclass(frozen=True)
class Variant:
    layout: str
    tile: GroupedTile
    is_gated: bool = False


def variants(max_shared_bytes: int, layouts: list[str]) -> list[Variant]:
    found = {
        Variant(name, choose_tile(rows, columns, LAYOUTS[name], is_gated, fixed, max_shared_bytes),
                is_gated)
        for name in layouts
        for is_gated in (False, True)
        for rows in (ROWS if not is_gated else (1,))
        for columns in COLUMNS
        for fixed in ((False,) if is_gated else (False, True))
    }  # fmt: skip
    return sorted(found, key=str)


def cases() -> list[Case]:
    common, *others = LAYOUTS
    found = [_case(variant, 90) for variant in variants(SHARED_BYTES[90], [common])]
    for name in others:
        layout = LAYOUTS[name]
        for rows, columns, is_gated in ((1, 6144, False), (65, 6144, False), (9, 24576, True)):
            tile = choose_tile(rows, columns, layout, is_gated, False, SHARED_BYTES[90])
            found.append(_case(Variant(name, tile, is_gated), 90, is_even=rows > 1))
    for capability in (80, 89, 100):
        for name, rows in ((common, 1), ("Q4_K", 65), ("float8", 17)):
            tile = choose_tile(rows, 6144, LAYOUTS[name], False, False, SHARED_BYTES[capability])
            found.append(_case(Variant(name, tile), capability))
    whole = Variant(common, FLOAT32_TILE)
    decode = choose_tile(8, 4096, LAYOUTS[common], False, False, SHARED_BYTES[90])
    return [
        *found,
        _case(whole, 90, x="*fp32", out="*fp32"),
        _case(Variant(common, decode), 90, x="*fp16", out="*fp16", bias="*fp16"),
        *(_rows_case(name) for name in LAYOUTS),
    ]


def _num_scale_loads(layout: Layout, is_gated: bool) -> int:
    """A thread has two columns of a tile, and all words of each; zero points once more."""
    num_words = layout.num_words + layout.has_zeros + 2 * (layout.scales == "super")
    return 2 * num_words * (2 if is_gated else 1)


def _num_short_copies(variant: Variant) -> int:
    layout, tile = LAYOUTS[variant.layout], variant.tile
    share = 2 * tile.block_t * layout.plane // (32 * tile.num_warps)
    return layout.num_planes if share < 16 else 0


def _rows_case(name: str) -> Case:
    layout = LAYOUTS[name]
    signature = {
        "weight": "*i32", "scales": "*i32", "row_ids": "*i64", "out": "*bf16", "num_rows": "i32",
        "num_columns": "i32", "num_inputs": "i32", "num_chunks": "i32", "first_row": "i32",
        "factor": "fp32",
    }  # fmt: skip
    absent: dict[str, None] = {"super_scales": None}
    if layout.scales == "super":
        signature |= {"super_scales": "*i32"}
        absent = {}
    return Case(
        name=f"rows of grouped weights, {name}",
        kernel=grouped_rows_kernel,
        signature=signature,
        constexprs={"BLOCK_R": BLOCK_R, **constants(layout), **absent},
        num_warps=NUM_WARPS,
        capabilities=(80, 90),
    )


def _case(
    variant: Variant,
    capability: int,
    is_even: bool = True,
    out: str = "*bf16",
    bias: str | None = None,
    x: str = "*bf16",
) -> Case:
    layout, tile = LAYOUTS[variant.layout], variant.tile
    signature = {
        "x": x, "weight": "*i32", "scales": "*i32", "out": out, "num_rows": "i32",
        "num_columns": "i32", "num_inputs": "i32", "num_chunks": "i32", "x_stride": "i32",
    }  # fmt: skip
    optional = {"bias": bias, "super_scales": "*i32" if layout.scales == "super" else None}
    signature |= {name: kind for name, kind in optional.items() if kind is not None}
    absent = {name: None for name, kind in optional.items() if kind is None}
    is_half = x != "*fp32"
    # Products of 64 columns and more are those of a group of warps.
    on_hopper = "wgmma.mma_async" if tile.block_o >= 64 else "mma.sync"
    return Case(
        name=f"grouped linear of {x}, {variant}, even {is_even}",
        kernel=grouped_linear_kernel,
        signature=signature,
        constexprs={
            "BLOCK_T": tile.block_t,
            "BLOCK_O": tile.block_o,
            "IS_EVEN": is_even,
            "IS_GATED": variant.is_gated,
            "IS_GELU": False,
            **constants(layout),
            **absent,
        },
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        aligned=tuple(n for n in signature if n not in ("num_rows", "num_chunks")),
        instructions={80: "mma.sync", 89: "mma.sync", 90: on_hopper} if is_half else {},
        capabilities=(capability,),
        max_shared_bytes=tile.shared_bytes(layout, variant.is_gated) if is_half else None,
        max_spill_bytes=48,
        num_early_loads=_num_scale_loads(layout, variant.is_gated) + _num_short_copies(variant),
    )
