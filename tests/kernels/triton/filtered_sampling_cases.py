"""Sampling with filters as the backend launches it, for the compiler; a vocabulary of 151,936."""

from __future__ import annotations

from typing import Any

from nanocore.kernels.triton.filtered_sampling import choose_kernel, gather_kernel, survey_kernel
from tests.kernels.triton.compilation import Case

_TYPES = {
    "logits": "*fp32", "temperature": "*fp32", "seed": "*i64", "position": "*i64", "top_k": "*i32",
    "top_p": "*fp32", "min_p": "*fp32", "part_best": "*fp32", "part_count": "*i32",
    "part_mass": "*fp32", "candidates": "*fp32", "ids": "*i32", "row_count": "*i32",
    "row_mass": "*fp64", "value": "*fp32", "column": "*i64", "num_columns": "i32",
    "num_parts": "i32", "stride": "i32",
}  # fmt: skip
_SIZES = {"PARTS": 128, "BLOCK": 2048, "MAX_CANDIDATES": 16384}


def cases() -> list[Case]:
    return [
        _case("filters: survey", survey_kernel, _SIZES, num_warps=4),
        _case("filters: gather", gather_kernel, _SIZES, num_warps=4),
        _case("filters: choose", choose_kernel, _SIZES, num_warps=8),
    ]


def _case(name: str, kernel: Any, sizes: dict[str, int], num_warps: int) -> Case:
    names = kernel.arg_names
    return Case(
        name=name,
        kernel=kernel,
        signature={name: _TYPES[name] for name in names if name in _TYPES},
        constexprs={name: sizes[name] for name in names if name in sizes},
        num_warps=num_warps,
        num_stages=3,
        aligned=tuple(n for n in names if n in _TYPES and not n.startswith("num_")),
    )
