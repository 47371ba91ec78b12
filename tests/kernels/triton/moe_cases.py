"""Experts as the backend launches them, for the compiler: those of every model we serve."""

from __future__ import annotations

from nanocore.kernels.triton.matmul import Tile
from nanocore.kernels.triton.moe import choose_tile, grouped_kernel, weighted_sum_kernel
from tests.kernels.triton.compilation import SHARED_BYTES, Case, give_if
from tests.kernels.triton.model_shapes import Product, experts

ROWS = (1, 16, 17, 64, 65, 1000)
"""Pairs of an expert on average, about where tiles change."""

_TYPES = {
    "x": "*bf16", "weight": "*bf16", "out": "*bf16", "pair_of_row": "*i32",
    "expert_of_tile": "*i32", "num_tiles": "*i32", "num_columns": "i32", "num_inputs": "i32",
    "x_stride": "i32",
}  # fmt: skip


def variants(max_shared_bytes: int) -> dict[tuple[Tile, bool], list[Product]]:
    """The products in each shape, (tile, whether gated), where a program may have so much."""
    found: dict[tuple[Tile, bool], list[Product]] = {}
    for product, num_experts in sorted(experts(), key=str):
        for batch_invariant in (False, True):
            for rows in ROWS:
                tile = choose_tile(
                    rows * num_experts,
                    num_experts,
                    product.is_gated,
                    batch_invariant,
                    max_shared_bytes,
                )
                found.setdefault((tile, product.is_gated), []).append(product)
    return found


def cases() -> list[Case]:
    return [
        _sum_case("sum of experts", has_shared=False),
        _sum_case("sum of experts and a shared one", has_shared=True),
        *[
            _case(tile, is_gated, is_even, capability)
            for capability, max_shared_bytes in SHARED_BYTES.items()
            for (tile, is_gated), its_products in variants(max_shared_bytes).items()
            for is_even in {product.inputs % tile.block_i == 0 for product in its_products}
        ],
    ]


def _sum_case(name: str, has_shared: bool) -> Case:
    signature = {
        "y": "*bf16", "weights": "*fp32", "out": "*bf16", "size": "i32", "gate_stride": "i32",
        "shared_stride": "i32",
    }  # fmt: skip
    constexprs: dict[str, int | None] = {"NUM_CHOSEN": 8, "BLOCK": 1024}
    shared = {"gate": "*bf16", "shared": "*bf16"}
    give_if(has_shared, shared, signature, constexprs)
    return Case(
        name=name,
        kernel=weighted_sum_kernel,
        signature=signature,
        constexprs=constexprs,
        aligned=tuple(name for name in signature if name != "gate_stride"),
    )


def _case(tile: Tile, is_gated: bool, is_even: bool, capability: int) -> Case:
    return Case(
        name=f"experts, {tile}, gated {is_gated}, even {is_even}",
        kernel=grouped_kernel,
        signature=_TYPES,
        constexprs={
            "PAIRS_PER_ROW": 8 if is_gated else 1,
            "BLOCK_T": tile.block_t,
            "BLOCK_O": tile.block_o,
            "BLOCK_I": tile.block_i,
            "IS_EVEN": is_even,
            "IS_GATED": is_gated,
            "IS_GELU": False,
        },
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        aligned=tuple(_TYPES),
        instructions={
            **dict.fromkeys((80, 89), "mma.sync"),
            90: "wgmma.mma_async" if tile.block_t >= 64 else "mma.sync",
        },
        capabilities=(capability,),
        max_shared_bytes=tile.shared_bytes(2, is_gated),
    )
