"""Gates as the backend launches them, for the compiler."""

from __future__ import annotations

from nanocore.kernels.triton.gate import gated_kernel
from tests.kernels.triton.compilation import Case


def cases() -> list[Case]:
    return [_case("gate silu", is_gelu=False), _case("gate gelu", is_gelu=True)]


def _case(name: str, is_gelu: bool) -> Case:
    return Case(
        name=name,
        kernel=gated_kernel,
        signature={"x": "*bf16", "out": "*bf16", "size": "i32", "x_stride": "i32"},
        constexprs={"BLOCK": 1024, "IS_GELU": is_gelu},
        aligned=("x", "out", "size", "x_stride"),
    )
