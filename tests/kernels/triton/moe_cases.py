"""Experts as the backend launches them, for the compiler; Qwen3-30B-A3B's shapes."""

from __future__ import annotations

from nanocore.kernels.triton.matmul import Tile
from nanocore.kernels.triton.moe import choose_tile, grouped_kernel, weighted_sum_kernel
from tests.kernels.triton.compilation import Case

_TYPES = {
    "x": "*bf16", "weight": "*bf16", "out": "*bf16", "pair_of_row": "*i32",
    "expert_of_tile": "*i32", "num_tiles": "*i32", "num_columns": "i32", "num_inputs": "i32",
    "x_stride": "i32",
}  # fmt: skip


def cases() -> list[Case]:
    return [
        _sum_case("sum of experts", has_shared=False),
        _sum_case("sum of experts and a shared one", has_shared=True),
        *[
            _case(f"experts' {product}, {name}", choose_tile(pairs, 128, is_gated, False), is_gated)
            for product, is_gated in (("gate and up", True), ("down", False))
            for name, pairs in (("decodes", 8), ("a chunk", 8000), ("a prompt", 10**6))
        ],
    ]


def _sum_case(name: str, has_shared: bool) -> Case:
    signature = {
        "y": "*bf16", "weights": "*fp32", "out": "*bf16", "size": "i32", "gate_stride": "i32",
        "shared_stride": "i32",
    }  # fmt: skip
    constexprs: dict[str, int | None] = {"NUM_CHOSEN": 8, "BLOCK": 1024}
    shared = {"gate": "*bf16", "shared": "*bf16"}
    if has_shared:
        signature |= shared
    else:
        constexprs |= dict.fromkeys(shared)
    return Case(
        name=name,
        kernel=weighted_sum_kernel,
        signature=signature,
        constexprs=constexprs,
        num_warps=4,
        num_stages=3,
        aligned=tuple(name for name in signature if name != "gate_stride"),
    )


def _case(name: str, tile: Tile, is_gated: bool) -> Case:
    return Case(
        name=name,
        kernel=grouped_kernel,
        signature=_TYPES,
        constexprs={
            "PAIRS_PER_ROW": 8 if is_gated else 1, "BLOCK_T": tile.block_t,
            "BLOCK_O": tile.block_o, "BLOCK_I": tile.block_i, "IS_EVEN": True,
            "IS_GATED": is_gated, "IS_GELU": False,
        },
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        aligned=tuple(_TYPES),
        instructions={
            80: "mma.sync",
            90: "wgmma.mma_async" if tile.block_t >= 64 else "mma.sync",
        },
    )  # fmt: skip
