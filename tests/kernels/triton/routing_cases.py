"""Routing as the backend launches it, for the compiler; of Qwen3-30B-A3B, Qwen1.5-MoE and LFM2."""

from __future__ import annotations

from typing import Any

from nanocore.kernels.triton.routing import (
    PLAN_WARPS,
    count_kernel,
    plan_kernel,
    plan_step,
    route_kernel,
    route_warps,
)
from tests.kernels.triton.compilation import Case, give_if


def cases() -> list[Case]:
    return [
        _route_case("routing, 8 of 128", 128, 8, "*bf16", is_normalized=True),
        _route_case("routing, 4 of 60", 60, 4, "*bf16", is_normalized=False),
        _route_case("routing, 10 of 512, float32", 512, 10, "*fp32", is_normalized=True),
        _route_case("routing, 4 of 32, LFM2", 32, 4, "*bf16", is_normalized=True, is_plain=False),
        _count_case(),
        _plan_case("experts' plan of decodes", block_t=16, has_counts=False),
        _plan_case("experts' plan of a chunk", block_t=64, has_counts=True),
        _plan_case("experts' plan of a prompt", block_t=128, has_counts=True),
        _plan_case("experts' plan of a prompt, 512 experts", 128, has_counts=True, experts=512),
        _plan_case("experts' plan of decodes, 16 experts", 16, has_counts=False, experts=16),
    ]


def _route_case(
    name: str, experts: int, chosen: int, logits: str, is_normalized: bool, is_plain: bool = True
) -> Case:
    """is_plain: by the softmax alone, and not by the sigmoid and a bias."""
    block = 1 << (experts - 1).bit_length()
    signature = {
        "logits": logits, "expert_ids": "*i32", "weights": "*fp32", "stride": "i32",
        "epsilon": "fp32", "factor": "fp32",
    }  # fmt: skip
    constexprs: dict[str, Any] = {
        "NUM_EXPERTS": experts, "NUM_CHOSEN": chosen, "IS_SIGMOID": not is_plain,
        "IS_NORMALIZED": is_normalized, "BLOCK": block,
        "CHOSEN_BLOCK": 1 << (chosen - 1).bit_length(),
    }  # fmt: skip
    give_if(not is_plain, {"bias": "*fp32"}, signature, constexprs)
    return Case(name, route_kernel, signature, constexprs, num_warps=route_warps(block))


def _count_case() -> Case:
    return Case(
        name="experts' counts",
        kernel=count_kernel,
        signature={"expert_ids": "*i32", "counts": "*i32", "num_pairs": "i32", "span": "i32"},
        constexprs={"NUM_EXPERTS": 128, "NUM_BINS": 128, "STEP": plan_step(128)},
        num_warps=PLAN_WARPS,
        aligned=("expert_ids", "counts"),
    )


def _plan_case(name: str, block_t: int, has_counts: bool, experts: int = 128) -> Case:
    signature = {
        "expert_ids": "*i32", "pair_of_row": "*i32", "expert_of_tile": "*i32", "num_tiles": "*i32",
        "num_pairs": "i32", "span": "i32", "max_tiles": "i32",
    }  # fmt: skip
    constexprs: dict[str, int | None] = {
        "NUM_EXPERTS": experts, "NUM_BINS": experts, "BLOCK_T": block_t, "STEP": plan_step(experts),
    }  # fmt: skip
    give_if(has_counts, {"counts": "*i32"}, signature, constexprs)
    return Case(
        name=name,
        kernel=plan_kernel,
        signature=signature,
        constexprs=constexprs,
        num_warps=PLAN_WARPS,
        aligned=tuple(name for name, kind in signature.items() if kind.startswith("*")),
    )
