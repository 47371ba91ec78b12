"""Linear layers as the backend launches them, for the compiler: of every model we serve."""

from __future__ import annotations

from dataclasses import dataclass

from nanocore.kernels.triton.linear import FUSED_GATE_TOKENS
from nanocore.kernels.triton.matmul import FLOAT32_TILE, Tile, choose_tile, linear_kernel
from tests.kernels.triton.compilation import SHARED_BYTES, Case
from tests.kernels.triton.model_shapes import Product, products

ROWS = (1, 16, 17, 32, 33, 40, 64, 65, 8192)
"""About where tiles change."""

_NUM_FULLEST = 3
_BYTES = {"*bf16": 2, "*fp16": 2, "*i8": 1}


@dataclass(frozen=True)
class Variant:
    """What the choice of a tile can tell of a product. weight: its type."""

    tile: Tile
    weight: str
    is_gated: bool


def variants(max_shared_bytes: int) -> dict[Variant, list[Product]]:
    """The products that our kernel computes in each shape, where a program may have so much."""
    found: dict[Variant, list[Product]] = {}
    for product in sorted(products(), key=str):
        for weight in ("*bf16", "*i8"):
            for batch_invariant in (False, True):
                for rows in ROWS:
                    is_fused = product.is_gated and rows <= FUSED_GATE_TOKENS
                    if weight == "*i8" or batch_invariant or is_fused:
                        tile = choose_tile(
                            rows,
                            product.columns,
                            _BYTES[weight],
                            product.is_gated,
                            batch_invariant,
                            max_shared_bytes,
                        )
                        variant = Variant(tile, weight, product.is_gated)
                        found.setdefault(variant, []).append(product)
    return found


def _fullest(found: dict[Variant, list[Product]]) -> dict[Variant, list[Product]]:

    def num_bytes(variant: Variant) -> int:
        return variant.tile.shared_bytes(_BYTES[variant.weight], variant.is_gated)

    kinds = {(variant.weight, variant.is_gated) for variant in found}
    kept = [
        sorted((v for v in found if (v.weight, v.is_gated) == kind), key=num_bytes)[-_NUM_FULLEST:]
        for kind in sorted(kinds)
    ]
    return {variant: found[variant] for some in kept for variant in some}


def cases() -> list[Case]:
    found = []
    for capability, max_shared_bytes in SHARED_BYTES.items():
        chosen = variants(max_shared_bytes)
        if capability != 90:
            chosen = _fullest(chosen)
        for variant, its_products in chosen.items():
            bias = "*bf16" if any(product.has_bias for product in its_products) else None
            out = "*fp32" if any(product.is_head for product in its_products) else "*bf16"
            evens = {product.inputs % variant.tile.block_i == 0 for product in its_products}
            for_which = evens if capability == 90 else {min(evens)}
            found.extend(_case(variant, capability, even, out, bias) for even in for_which)
    few = Variant(Tile(32, 32, 128, num_warps=4, num_stages=5), "*bf16", is_gated=True)
    few_float16 = Variant(few.tile, "*fp16", is_gated=True)
    return [
        *found,
        _case(few, 90, is_gelu=True),
        _case(few_float16, 90, out="*fp16", x="*fp16"),
        _case(Variant(FLOAT32_TILE, "*fp32", is_gated=True), 90, out="*fp32", x="*fp32"),
    ]


def _case(
    variant: Variant,
    capability: int,
    is_even: bool = True,
    out: str = "*bf16",
    bias: str | None = None,
    x: str = "*bf16",
    is_gelu: bool = False,
) -> Case:
    tile, weight = variant.tile, variant.weight
    signature = {
        "x": x, "weight": weight, "out": out, "num_rows": "i32", "num_columns": "i32",
        "num_inputs": "i32", "x_stride": "i32",
    }  # fmt: skip
    constexprs = {
        "BLOCK_T": tile.block_t, "BLOCK_O": tile.block_o, "BLOCK_I": tile.block_i,
        "IS_EVEN": is_even, "IS_GATED": variant.is_gated, "IS_GELU": is_gelu,
    }  # fmt: skip
    optional = {"scale": "*fp32" if weight == "*i8" else None, "bias": bias}
    signature |= {name: kind for name, kind in optional.items() if kind is not None}
    constexprs |= {name: None for name, kind in optional.items() if kind is None}
    is_wide, is_half = tile.block_t >= 64, x != "*fp32"
    instructions = dict.fromkeys((80, 89), "mma.sync")
    instructions[90] = "wgmma.mma_async" if is_wide else "mma.sync"
    return Case(
        name=f"linear of {x}, {variant}, even {is_even}, to {out}, gelu {is_gelu}",
        kernel=linear_kernel,
        signature=signature,
        constexprs=constexprs,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        aligned=tuple(name for name in signature if name != "num_rows"),
        instructions=instructions if is_half else {},
        capabilities=(capability,),
        max_shared_bytes=tile.shared_bytes(_BYTES[weight], variant.is_gated) if is_half else None,
    )
