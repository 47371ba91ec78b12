"""Norms as the backend launches them, for the compiler."""

from __future__ import annotations

from nanocore.kernels.triton.norm import launch_options, rms_norm_kernel
from tests.kernels.triton.compilation import Case, give_if


def cases() -> list[Case]:
    return [
        _case("norm", 1024, is_sum=False),
        _case("norm of a head", 128, is_sum=False),
        _case("norm of a sum", 4096, is_sum=True),
        _case("norm of a sum, float32 weight", 2304, is_sum=True, weight="*fp32"),
        _case("norm of a sum in pieces", 16384, is_sum=True),
        _case("norm of selected sums", 4096, is_sum=True, selects=True),
        _case("norm of selected sums in pieces", 16384, is_sum=True, selects=True),
    ]


def _case(name: str, size: int, is_sum: bool, weight: str = "*bf16", selects: bool = False) -> Case:
    block, num_warps = launch_options(size)
    signature = {
        "x": "*bf16", "residual": "*bf16", "weight": weight, "out": "*bf16", "eps": "fp32",
        "x_stride": "i32", "residual_stride": "i32",
    }  # fmt: skip
    constexprs = {
        "SIZE": size, "BLOCK": block, "IS_SUM": is_sum, "KEEPS_SUM": is_sum and not selects
    }  # fmt: skip
    give_if(selects, {"index": "*i64"}, signature, constexprs)
    return Case(
        name=name,
        kernel=rms_norm_kernel,
        signature=signature,
        constexprs=constexprs,
        num_warps=num_warps,
        aligned=("x", "residual", "weight", "out", "x_stride", "residual_stride"),
    )
