"""Grouped weights of every form, and what linear layers of them should give."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch
import xxhash
from torch import Tensor

from nanocore.kernels.grouped_weight import GroupedWeight
from nanocore.kernels.interface import Kernels

LEAST_ROW_GROUP = 32
MAX_GROUP = 128


def _values(out_features: int, in_features: int, bits: int) -> Tensor:
    return torch.randint(0, 1 << bits, (out_features, in_features), dtype=torch.uint8)


def _groups(in_features: int, group_size: int) -> int:
    return -(-in_features // group_size)


def symmetric(
    out_features: int, in_features: int, group_size: int, bits: int = 4, dtype: str = "float16"
) -> GroupedWeight:
    scale_OG = torch.rand(out_features, _groups(in_features, group_size)) * 0.02 + 0.001
    values_OI = _values(out_features, in_features, bits)
    return GroupedWeight(values_OI, bits, group_size, scale_OG.to(getattr(torch, dtype)))


def with_zeros(
    out_features: int, in_features: int, group_size: int, bits: int = 4
) -> GroupedWeight:
    plain = symmetric(out_features, in_features, group_size, bits)
    zero_OG = torch.randint(0, 1 << bits, plain.scale_OG.shape, dtype=torch.uint8)
    return GroupedWeight(plain.values_OI, bits, group_size, plain.scale_OG, zero_OG)


def with_minima(
    out_features: int, in_features: int, group_size: int, bits: int = 4
) -> GroupedWeight:
    plain = symmetric(out_features, in_features, group_size, bits, "float32")
    minimum_OG = torch.rand(plain.scale_OG.shape) * 0.1
    return GroupedWeight(plain.values_OI, bits, group_size, plain.scale_OG, minimum_OG=minimum_OG)


def two_level(
    out_features: int, in_features: int, group_size: int, bits: int = 4, *, minima: bool = True
) -> GroupedWeight:
    shape = out_features, _groups(in_features, group_size)
    supers = out_features, _groups(in_features, 256)
    scale_OG = torch.randint(-60, 60, shape, dtype=torch.int8)
    super_scale_OS = (torch.rand(supers) * 1e-3).half()
    values_OI = _values(out_features, in_features, bits)
    if not minima:
        return GroupedWeight(values_OI, bits, group_size, scale_OG, super_scale_OS=super_scale_OS)
    return GroupedWeight(
        values_OI,
        bits,
        group_size,
        scale_OG,
        minimum_OG=torch.randint(0, 64, shape, dtype=torch.uint8),
        super_scale_OS=super_scale_OS,
        super_minimum_OS=(torch.rand(supers) * 1e-3).half(),
    )


def permuted(out_features: int, in_features: int, group_size: int) -> GroupedWeight:
    plain = with_zeros(out_features, in_features, group_size)
    permutation_I = torch.randperm(in_features, dtype=torch.int32)
    return GroupedWeight(
        plain.values_OI, 4, group_size, plain.scale_OG, plain.zero_OG, permutation_I=permutation_I
    )


NF4: Final = torch.tensor(
    [-1.0, -0.6962, -0.5251, -0.3949, -0.2844, -0.1848, -0.0911, 0.0, 0.0796, 0.1609, 0.2461,
     0.3379, 0.4407, 0.5626, 0.7230, 1.0]
).bfloat16().float()  # fmt: skip


def with_codebook(out_features: int, in_features: int, group_size: int) -> GroupedWeight:
    plain = symmetric(out_features, in_features, group_size, dtype="float32")
    return GroupedWeight(plain.values_OI, 4, group_size, plain.scale_OG, codebook=NF4)


Form = Callable[[int, int], GroupedWeight]

FORMS: Final[dict[str, Form]] = {
    **{f"4 bits, {g}": lambda o, i, g=g: symmetric(o, i, g) for g in (16, 32, 64, 128)},
    "4 bits, 32, bfloat16 scales": lambda o, i: symmetric(o, i, 32, dtype="bfloat16"),
    "4 bits, one group": lambda o, i: symmetric(o, i, i),
    "4 bits, groups of 96": lambda o, i: symmetric(o, i, 96),
    "4 bits, zeros, 128": lambda o, i: with_zeros(o, i, 128),
    "4 bits, zeros, 64": lambda o, i: with_zeros(o, i, 64),
    "4 bits, minima, 32": lambda o, i: with_minima(o, i, 32),
    "Q4_K": lambda o, i: two_level(o, i, 32),
    "Q5_K": lambda o, i: two_level(o, i, 32, 8),
    "Q6_K": lambda o, i: two_level(o, i, 16, 8, minima=False),
    "8 bits, 32": lambda o, i: symmetric(o, i, 32, 8),
    "8 bits, zeros, 64": lambda o, i: with_zeros(o, i, 64, 8),
    "8 bits, one scale an output": lambda o, i: symmetric(o, i, i, 8),
    "permuted": lambda o, i: permuted(o, i, 32),
}
"""By name; each takes any number of inputs."""


def row_group(weight: GroupedWeight) -> int:
    """Inputs that share an activation's scale: those of the weight's group, from 32 to 128."""
    size = weight.group_size
    if size in (16, 32, 64, 128):
        return max(LEAST_ROW_GROUP, size)
    # Others are cut: one group into parts of 128, more into the largest power of two that fits.
    return MAX_GROUP if weight.scale_OG.shape[1] == 1 else size & -size


def quantized_rows(x_TI: Tensor, group_size: int) -> Tensor:
    """float64 [T, I]: what activations are once they have eight bits."""
    num_rows, in_features = x_TI.shape
    padded = torch.nn.functional.pad(x_TI.float(), (0, -in_features % group_size))
    x_TGK = padded.view(num_rows, padded.shape[1] // group_size, group_size)
    largest = x_TGK.abs().amax(-1, keepdim=True)
    inverse = torch.where(largest < 1e-30, 0.0, torch.full_like(largest, 127.0) / largest)
    scale = torch.where(largest < 1e-30, 0.0, largest / 127.0)
    q_TGK = (x_TGK * inverse).round()
    return (q_TGK.double() * scale.double()).flatten(1)[:, :in_features]


def expected(x_TI: Tensor, weight: GroupedWeight, *, keeps_activations: bool = False) -> Tensor:
    dequantized_OI = weight.dequantize().double()
    if keeps_activations or weight.codebook is not None:
        return x_TI.double() @ dequantized_OI.T
    if weight.permutation_I is not None:
        order = weight.permutation_I.long()
        x_TI, dequantized_OI = x_TI[:, order], dequantized_OI[:, order]
    return quantized_rows(x_TI, row_group(weight)) @ dequantized_OI.T


def digest(kernels: Kernels) -> str:
    """A digest of products with weights of every form."""
    torch.manual_seed(0)
    digest = xxhash.xxh3_128()
    for form in FORMS.values():
        packed = kernels.pack_linear(form(70, 600))
        for num_rows in (1, 13):
            x_TI = torch.randn(num_rows, 600) * 3
            for dtype in (torch.float32, torch.bfloat16):
                digest.update(kernels.logits(x_TI.to(dtype), packed).numpy().tobytes())
    for quantization in ("int4", "int8"):
        packed = kernels.pack_linear(torch.randn(70, 600), quantization)
        digest.update(kernels.logits(torch.randn(13, 600), packed).numpy().tobytes())
    return digest.hexdigest()
