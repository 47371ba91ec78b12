"""Tokens quantized to E4M3 as the backend launches it, for the compilers of GPUs that have it."""

from __future__ import annotations

from nanocore.kernels.triton.fp8_linear import quantize_tokens_kernel
from nanocore.kernels.triton.norm import launch_options
from tests.kernels.triton.compilation import Case


def cases() -> list[Case]:
    return [
        _case("tokens to fp8", 1024),
        _case("tokens to fp8, no power of two", 2304),
        _case("tokens to fp8, float16", 4096, x="*fp16"),
        _case("tokens to fp8, in pieces", 29568),
    ]


def _case(name: str, size: int, x: str = "*bf16") -> Case:
    block, num_warps = launch_options(size)
    return Case(
        name=name,
        kernel=quantize_tokens_kernel,
        signature={"x": x, "values": "*fp8e4nv", "scales": "*fp32", "x_stride": "i32"},
        constexprs={"SIZE": size, "BLOCK": block},
        num_warps=num_warps,
        aligned=("x", "values", "scales", "x_stride"),
        instructions=dict.fromkeys((90, 100), "cvt.rn.satfinite.e4m3x2.f32"),
        capabilities=(89, 90, 100),
    )
