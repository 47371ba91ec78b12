"""Linear layers as the backend launches them, for the compiler."""

from __future__ import annotations

from nanocore.kernels.triton.matmul import choose_tile, linear_kernel
from tests.kernels.triton.compilation import Case


def cases() -> list[Case]:
    return [
        _case("linear, a decode", rows=1, columns=1024),
        _case("linear, decodes", rows=32, columns=4096),
        _case("linear, float16", rows=32, columns=4096, x="*fp16", weight="*fp16", out="*fp16"),
        _case("linear, 64 decodes", rows=64, columns=4096),
        _case("logits, decodes", rows=16, columns=151936, out="*fp32"),
        _case("gated, decodes", rows=16, columns=3072, is_gated=True),
        _case("gated, 64 decodes", rows=64, columns=12288, is_gated=True, bias="*bf16"),
        _case("int8 linear, decodes", rows=16, columns=4096, weight="*i8"),
        _case("int8 linear, a prompt", rows=999, columns=4096, weight="*i8"),
        _case("int8 gated, a prompt", rows=999, columns=12288, weight="*i8", is_gated=True),
        _case("invariant linear", rows=1, columns=1024, batch_invariant=True, bias="*bf16"),
        _case("invariant logits", rows=1, columns=4096, batch_invariant=True, out="*fp32"),
        _case("invariant gated", rows=1, columns=3072, batch_invariant=True, is_gated=True),
        _case("invariant int8", rows=1, columns=4096, batch_invariant=True, weight="*i8"),
    ]


def _case(
    name: str,
    rows: int,
    columns: int,
    x: str = "*bf16",
    weight: str = "*bf16",
    bias: str | None = None,
    out: str = "*bf16",
    is_gated: bool = False,
    batch_invariant: bool = False,
) -> Case:
    weight_bytes = 1 if weight == "*i8" else 2
    tile = choose_tile(rows, columns, weight_bytes, is_gated, batch_invariant)
    signature = {
        "x": x, "weight": weight, "out": out, "num_rows": "i32", "num_columns": "i32",
        "num_inputs": "i32", "x_stride": "i32",
    }  # fmt: skip
    constexprs = {
        "BLOCK_T": tile.block_t, "BLOCK_O": tile.block_o, "BLOCK_I": tile.block_i,
        "IS_EVEN": True, "IS_GATED": is_gated, "IS_GELU": False,
    }  # fmt: skip
    optional = {"scale": "*fp32" if weight == "*i8" else None, "bias": bias}
    signature |= {name: kind for name, kind in optional.items() if kind is not None}
    constexprs |= {name: None for name, kind in optional.items() if kind is None}
    return Case(
        name=name,
        kernel=linear_kernel,
        signature=signature,
        constexprs=constexprs,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        aligned=tuple(name for name in signature if name != "num_rows"),
        instructions={
            80: "mma.sync",
            90: "wgmma.mma_async" if tile.block_t >= 64 else "mma.sync",
        },
    )
