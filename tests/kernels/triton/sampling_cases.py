"""Sampling without filters as the backend launches it, for the compiler."""

from __future__ import annotations

from nanocore.kernels.triton.sampling import best_of_part_kernel, best_of_parts_kernel
from tests.kernels.triton.compilation import Case, give_if

MASK = {"mask_words": "*i32", "mask_index": "*i32"}
"""Of a `TokenMask`; None where rows have none."""


def cases() -> list[Case]:
    return [
        _case("best token", "*fp32", has_noise=False),
        _case("best token with noise", "*fp32", has_noise=True),
        _case("best token with noise, bfloat16", "*bf16", has_noise=True),
        _case("best token of a mask", "*fp32", has_noise=False, has_mask=True),
        _case("best token of a mask, with noise", "*fp32", has_noise=True, has_mask=True),
        _parts_case("best of parts", has_table=False),
        _parts_case("best of parts, written to the token table", has_table=True),
    ]


def _parts_case(name: str, has_table: bool) -> Case:
    signature = {
        "part_value": "*fp32", "part_column": "*i32", "value": "*fp32", "column": "*i64",
        "num_parts": "i32", "token_stride": "i32",
    }  # fmt: skip
    constexprs: dict[str, int | None] = {"BLOCK": 128}
    table = {"token_table": "*i32", "rows": "*i64", "positions": "*i64"}
    give_if(has_table, table, signature, constexprs)
    return Case(
        name=name,
        kernel=best_of_parts_kernel,
        signature=signature,
        constexprs=constexprs,
        num_warps=1,
        aligned=("part_value", "part_column", "value", "column"),
    )


def _case(name: str, logits: str, has_noise: bool, has_mask: bool = False) -> Case:
    signature = {
        "logits": logits, "part_value": "*fp32", "part_column": "*i32", "first_token": "i32",
        "num_columns": "i32", "stride": "i32", "num_words": "i32",
    }  # fmt: skip
    constexprs: dict[str, int | None] = {"HAS_NOISE": has_noise, "BLOCK": 2048}
    rows = {"temperature": "*fp32", "seed": "*i64", "position": "*i64"}
    give_if(has_noise, rows, signature, constexprs)
    aligned = signature.keys() - {"first_token", "num_columns", "num_words"}
    give_if(has_mask, MASK, signature, constexprs)
    return Case(
        name=name,
        kernel=best_of_part_kernel,
        signature=signature,
        constexprs=constexprs,
        aligned=tuple(aligned),
    )
