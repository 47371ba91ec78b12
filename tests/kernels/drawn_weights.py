"""Random weights of small numbers in every form that checkpoints have."""

from __future__ import annotations

import torch
from torch import Tensor

from nanocore.kernels.grouped_weight import Float8Weight, GroupedWeight

FORMS = (
    "groups of 128", "zeros", "bfloat16", "float32", "permuted", "per output", "minima",
    "super", "8 bits", "8 bits per output", "8 bits, super", "codebook",
)  # fmt: skip


def draw_groups(form: str, out_features: int, in_features: int) -> GroupedWeight:
    generator = torch.Generator().manual_seed(out_features * in_features)
    bits = 8 if "8 bits" in form else 4
    sizes = {"groups of 128": 128, "zeros": 64, "8 bits": 128, "8 bits, super": 16, "float32": 96}
    group_size = in_features if "per output" in form else sizes.get(form, 32)
    num_groups = -(-in_features // group_size)

    def ints(columns: int, low: int, high: int) -> Tensor:
        return torch.randint(low, high, (out_features, columns), generator=generator)

    def scales(columns: int, factor: float) -> Tensor:
        return torch.rand(out_features, columns, generator=generator) * factor

    values_OI = ints(in_features, 0, 1 << bits).to(torch.uint8)
    scale_OG = scales(num_groups, 8.0 / (1 << bits)).half()
    if form == "zeros":
        zero_OG = ints(num_groups, 0, 16).to(torch.uint8)
        return GroupedWeight(values_OI, 4, group_size, scale_OG, zero_OG)
    if form == "minima":
        minimum_OG = scales(num_groups, 4.0)
        return GroupedWeight(values_OI, 4, group_size, scale_OG, minimum_OG=minimum_OG)
    if form == "super":
        return GroupedWeight(
            values_OI, 4, 32, ints(num_groups, 0, 64).to(torch.int8),
            minimum_OG=ints(num_groups, 0, 256).to(torch.uint8),
            super_scale_OS=scales(-(-in_features // 256), 0.01).half(),
            super_minimum_OS=scales(-(-in_features // 256), 0.01).half(),
        )  # fmt: skip
    if form == "8 bits, super":
        return GroupedWeight(
            values_OI % 64 + 96, 8, 16, ints(num_groups, -128, 128).to(torch.int8),
            super_scale_OS=scales(-(-in_features // 256), 0.001).half(),
        )  # fmt: skip
    permutation_I = codebook = None
    if form == "permuted":
        permutation_I = torch.randperm(in_features, generator=generator).int()
    if form == "codebook":  # MXFP4's
        half = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
        codebook = torch.cat((half, -half))
    dtype = {"bfloat16": torch.bfloat16, "float32": torch.float32}.get(form, torch.float16)
    return GroupedWeight(
        values_OI, bits, group_size, scale_OG.to(dtype), permutation_I=permutation_I,
        codebook=codebook,
    )  # fmt: skip


def draw_float8(out_features: int, in_features: int, has_blocks: bool) -> Float8Weight:
    generator = torch.Generator().manual_seed(out_features * in_features)
    size = out_features * in_features
    bits_N = torch.arange(size) % 255  # 255 is NaN, and so is 127
    bits_N = bits_N.masked_fill(bits_N == 127, 126)[torch.randperm(size, generator=generator)]
    shape = (out_features, 1)
    if has_blocks:
        shape = -(-out_features // 128), -(-in_features // 128)
    values_OI = bits_N.to(torch.uint8).view(out_features, in_features).view(torch.float8_e4m3fn)
    return Float8Weight(values_OI, torch.rand(shape, generator=generator) / 100)
