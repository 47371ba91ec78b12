"""Sampling without filters as the backend launches it, for the compiler."""

from __future__ import annotations

from nanocore.kernels.triton.sampling import best_of_part_kernel, best_of_parts_kernel
from tests.kernels.triton.compilation import Case


def cases() -> list[Case]:
    return [
        _case("best token", "*fp32", has_noise=False),
        _case("best token with noise", "*fp32", has_noise=True),
        _case("best token with noise, bfloat16", "*bf16", has_noise=True),
        Case(
            name="best of parts",
            kernel=best_of_parts_kernel,
            signature={
                "part_value": "*fp32", "part_column": "*i32", "value": "*fp32", "column": "*i64",
                "num_parts": "i32",
            },
            constexprs={"BLOCK": 128},
            num_warps=1,
            num_stages=3,
        ),
    ]  # fmt: skip


def _case(name: str, logits: str, has_noise: bool) -> Case:
    signature = {
        "logits": logits, "part_value": "*fp32", "part_column": "*i32", "first_token": "i32",
        "num_columns": "i32", "stride": "i32",
    }  # fmt: skip
    constexprs = {"HAS_NOISE": has_noise, "BLOCK": 2048}
    rows = {"temperature": "*fp32", "seed": "*i64", "position": "*i64"}
    if has_noise:
        signature |= rows
    else:
        constexprs |= dict.fromkeys(rows)
    return Case(
        name=name,
        kernel=best_of_part_kernel,
        signature=signature,
        constexprs=constexprs,
        num_warps=4,
        num_stages=3,
        aligned=tuple(name for name in signature if name not in ("first_token", "num_columns")),
    )
