"""What precedes attention as the backend launches it, for the compiler."""

from __future__ import annotations

from typing import Any

from nanocore.kernels.triton.rope import NUM_WARPS, head_sizes, rope_and_store_kv_kernel
from tests.kernels.triton.block_constants import block_constants
from tests.kernels.triton.compilation import Case

_HOPPER: dict[str, Any] = {"capabilities": (90,)}
_FROM_ADA: dict[str, Any] = {"capabilities": (89, 90, 100)}


def cases() -> list[Case]:
    return [
        _case("rope", norm=None),
        _case("rope and norms", norm="*bf16"),
        _case("rope and norms, head dim 64", norm="*bf16", head_dim=64),
        _case("rope and float32 norms, head dim 256", norm="*fp32", head_dim=256),
        _case("partial rope", norm=None, head_dim=80, half=16),
        _case("rope of odd halves", norm=None, head_dim=96, half=48),
        _case("no rotation", norm=None, half=1),
        *(
            _case(
                f"rope, {name} cache, head dim {head_dim}", "*bf16", head_dim, cache=cache, **for_
            )
            for head_dim in (64, 80, 96, 112, 128, 192, 256)
            for name, cache, for_ in (
                ("int8", "*i8", {} if head_dim == 128 else _HOPPER),
                ("fp8", "*fp8e4nv", _FROM_ADA if head_dim == 128 else _HOPPER),
            )
        ),
    ]


def _case(
    name: str,
    norm: str | None,
    head_dim: int = 128,
    half: int | None = None,
    cache: str = "*bf16",
    heads: int = 16,
    kv_heads: int = 8,
    **options: Any,
) -> Case:
    optional = {
        "q_weight": norm, "k_weight": norm,
        **dict.fromkeys(("k_scale", "v_scale"), None if cache == "*bf16" else "*fp32"),
    }  # fmt: skip
    signature = {
        "qkv": "*bf16", "cos": "*bf16", "sin": "*bf16", "k_cache": cache, "v_cache": cache,
        "positions": "*i64", "slots": "*i64", "qkv_stride": "i32", "eps": "fp32",
        **{name: kind for name, kind in optional.items() if kind},
    }  # fmt: skip
    return Case(
        name=name,
        kernel=rope_and_store_kv_kernel,
        signature=signature,
        constexprs={
            "HEADS": heads,
            "KV_HEADS": kv_heads,
            **block_constants(cache, kv_heads, head_dim, block_size=64),
            **head_sizes(max(heads, kv_heads), head_dim, half or head_dim // 2),
            **{name: None for name, kind in optional.items() if kind is None},
        },
        num_warps=NUM_WARPS,
        **options,
        aligned=tuple(
            name
            for name, kind in signature.items()
            if name == "qkv_stride" or (kind[0] == "*" and name not in ("positions", "slots"))
        ),
    )
