"""Sampling with filters as the backend launches it, for the compiler; a vocabulary of 151,936."""

from __future__ import annotations

from typing import Any

from nanocore.kernels.triton.filtered_sampling import choose_kernel, gather_kernel, survey_kernel
from tests.kernels.triton.compilation import Case
from tests.kernels.triton.sampling_cases import MASK

_TYPES = {
    "logits": "*fp32", "temperature": "*fp32", "seed": "*i64", "position": "*i64", "top_k": "*i32",
    "top_p": "*fp32", "min_p": "*fp32", "part_best": "*fp32", "part_count": "*i32",
    "part_mass": "*fp32", "candidates": "*fp32", "ids": "*i32", "row_count": "*i32",
    "row_mass": "*fp64", "value": "*fp32", "column": "*i64", "num_columns": "i32",
    "num_parts": "i32", "stride": "i32", "num_words": "i32",
}  # fmt: skip
_SIZES = {"PARTS": 128, "BLOCK": 2048, "MAX_CANDIDATES": 16384}


def cases() -> list[Case]:
    return [
        case
        for has_mask in (False, True)
        for case in (
            _case("filters: survey", survey_kernel, 4, has_mask),
            _case("filters: gather", gather_kernel, 4, has_mask),
            _case("filters: choose", choose_kernel, 8, has_mask),
        )
    ]


def _case(name: str, kernel: Any, num_warps: int, has_mask: bool) -> Case:
    names = kernel.arg_names
    signature = {name: _TYPES[name] for name in names if name in _TYPES}
    aligned = tuple(name for name in signature if not name.startswith("num_"))
    constexprs: dict[str, int | None] = {name: _SIZES[name] for name in names if name in _SIZES}
    if has_mask:
        name, signature = f"{name}, with a mask", signature | MASK
    else:
        constexprs |= dict.fromkeys(MASK)
    return Case(
        name=name,
        kernel=kernel,
        signature=signature,
        constexprs=constexprs,
        num_warps=num_warps,
        aligned=aligned,
    )
