"""The weights of linear layers as backends keep them, and their quantization to int8 or fp8.

int8 has a scale for each 32 inputs of an output feature (on CUDA for all inputs: LLM.int8, Dettmers
et al. 2022), and is here weight-only, so the layer's result is exactly that of the rounded weights;
the native kernels round activations, too. fp8 is E4M3 with a scale for each output feature, and
activations are, too, with one for each token.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

import msgspec
import torch
from torch import Tensor

from nanocore.kernels.group_quantization import GROUP_SIZE, quantize_eight_bits, quantize_groups
from nanocore.kernels.grouped_weight import CheckpointWeight

FP8: Final = torch.float8_e4m3fn
_LARGEST_FP8: Final = 448.0
_FP8_MULTIPLE: Final = 16
"""Both sizes of a weight are multiples of it: fp8 products need that."""


@dataclass(frozen=True, slots=True)
class LinearWeight:
    """A weight [out_features, in_features] as one backend keeps it; see `Kernels.pack_linear`.

    data: the backend's own. dtype: of the values in it. scale_O: float32, what quantized values are
    to be multiplied by, one number for each output feature (perhaps padded); None for others. Of
    int8 by torch it is float16 [O, G], of groups.
    segments: weights that are too unlike to be one; their outputs, in this order, are this one's,
    which has no data then.
    """

    out_features: int
    in_features: int
    dtype: torch.dtype
    data: Tensor
    scale_O: Tensor | None = None
    segments: tuple[LinearWeight, ...] = field(default=(), kw_only=True)

    @property
    def num_bytes(self) -> int:
        own = self.data.nbytes + (self.scale_O.nbytes if self.scale_O is not None else 0)
        return own + sum(segment.num_bytes for segment in self.segments)

    def parts(self, bias_O: Tensor | None) -> list[tuple[LinearWeight, Tensor | None]]:
        """The segments, or the weight itself, each with its part of the bias."""
        weights = self.segments or (self,)
        if bias_O is None or not self.segments:
            return [(weight, bias_O) for weight in weights]
        sizes = [weight.out_features for weight in weights]
        return list(zip(weights, bias_O.split(sizes), strict=True))


def in_segments(weights: Sequence[LinearWeight]) -> LinearWeight:
    weights = [segment for weight in weights for segment in weight.segments or (weight,)]
    first = weights[0]
    if len(weights) == 1:
        return first
    out_features = sum(weight.out_features for weight in weights)
    nothing = first.data.new_empty(0)
    return LinearWeight(
        out_features, first.in_features, first.dtype, nothing, segments=tuple(weights)
    )


class TokenEmbedding(msgspec.Struct, frozen=True):
    """Lookup of hidden states in dtype: rows token_id - first_token times factor.

    Tokens that the weight lacks (another rank has them, or they are none) become zeros.
    """

    weight: LinearWeight
    first_token: int
    factor: float
    dtype: torch.dtype


def check_quantization_name(
    name: str | None, known: tuple[str, ...] = ("int4", "int8", "fp8")
) -> None:
    if name is not None and name not in known:
        raise ValueError(f"unknown quantization {name!r}; known: {', '.join(known)}")


def pack_rows(
    weight: CheckpointWeight, quantization: str | None = None, dtype: torch.dtype | None = None
) -> LinearWeight:
    """The weight row by row, quantized if so asked.

    What is stored quantized is dequantized, in dtype, or in float32 if that is None; so is what
    is to have four bits: its values are those, and take as much memory as before.
    fp8 leaves a weight as it is whose sizes are no multiples of 16: no product could take it.
    """
    check_quantization_name(quantization)
    if isinstance(weight, Tensor):
        weight_OI = weight
    else:
        weight_OI = weight.dequantize().to(dtype or torch.float32)
    data, scale_O = weight_OI, None
    if weight_OI.is_meta and quantization in ("int8", "int4"):
        # Sizes are enough; some operations on meta tensors import torch's compiler, for seconds.
        if quantization == "int8":
            num_groups = -(-weight_OI.shape[1] // GROUP_SIZE)
            data = weight_OI.new_empty(weight_OI.shape, dtype=torch.int8)
            scale_O = weight_OI.new_empty((weight_OI.shape[0], num_groups), dtype=torch.float16)
    elif quantization == "int8":
        groups = quantize_eight_bits(weight_OI)
        data = (groups.values_OI.to(torch.int16) - 128).to(torch.int8)
        scale_O = groups.scale_OG
    elif quantization == "int4":
        data = quantize_groups(weight_OI).dequantize().to(weight_OI.dtype)
    elif quantization == "fp8" and can_multiply_float8(weight_OI):
        data, scale_O = quantize_rows(weight_OI)
    out_features, in_features = weight_OI.shape
    return LinearWeight(out_features, in_features, data.dtype, data, scale_O)


def can_multiply_float8(weight_OI: Tensor) -> bool:
    """Whether there are products of E4M3 with a weight of these sizes."""
    return not any(size % _FP8_MULTIPLE for size in weight_OI.shape)


def widen(values_RI: Tensor, scale_RG: Tensor) -> Tensor:
    """float32 [R, I]: rows of an int8 weight. scale_RG: of groups, or [R], of whole rows."""
    if scale_RG.dim() == 1:
        return values_RI.float() * scale_RG[:, None]
    scale_RI = scale_RG.float().repeat_interleave(GROUP_SIZE, 1)[:, : values_RI.shape[1]]
    return values_RI.float() * scale_RI


def pack_output_scales(weight_OI: Tensor) -> LinearWeight:
    """The weight in int8 with a scale for each output feature, as the kernels for CUDA take it."""
    largest_O = weight_OI.float().abs().amax(dim=1)
    # Multiplied by the inverse, as the native kernels do, so that both round alike.
    # (A number divided by a tensor is its reciprocal times the number, which is rounded twice.)
    inverse_O = torch.full_like(largest_O, 127.0) / largest_O
    inverse_O1 = inverse_O.masked_fill(largest_O == 0, 0.0)[:, None]
    scale_O = largest_O / torch.full_like(largest_O, 127.0)
    values_OI = (weight_OI.float() * inverse_O1).round().to(torch.int8)
    out_features, in_features = weight_OI.shape
    return LinearWeight(out_features, in_features, torch.int8, values_OI, scale_O)


def quantize_rows(x_RI: Tensor) -> tuple[Tensor, Tensor]:
    """(E4M3 values [R, I], float32 scales [R]): of weights, or of tokens; x ~ value * scale.

    The largest magnitude of a row becomes the largest of E4M3, 448; zeros have the smallest scale.
    A row that is not finite has the scale NaN, so that what is computed with it is not either.
    Scales are quotients of tensors: on CUDA torch multiplies by the reciprocal of a Python number,
    and a scale that is off by its last bit rounds some values to their other neighbour.
    """
    largest_R = x_RI.abs().amax(dim=1).float()
    largest_R = largest_R.masked_fill(~largest_R.isfinite(), torch.nan)
    smallest = torch.finfo(torch.float32).tiny
    scale_R = (largest_R / torch.full_like(largest_R, _LARGEST_FP8)).clamp(min=smallest)
    return (x_RI / scale_R[:, None]).to(FP8), scale_R  # divided in float32


Experts = object
"""What a backend made of a layer's experts: its own, see `Kernels.pack_experts`."""


class ExpertWeights(msgspec.Struct):
    """X experts' projections, packed as those of linear layers; whoever stacks them empties it."""

    gates: list[LinearWeight]
    ups: list[LinearWeight]
    downs: list[LinearWeight]


class StackedExperts(msgspec.Struct, frozen=True):
    """gate_up_XIE: [X, 2 I, E], gate before up. down_XEI: [X, E, I]."""

    gate_up_XIE: Tensor
    down_XEI: Tensor


def stack(weights: ExpertWeights) -> StackedExperts:
    """Weights of floats, each of which is gone when it is copied."""
    gate, down = weights.gates[0], weights.downs[0]
    num_experts, inner = len(weights.gates), gate.out_features
    gate_up_XIE = gate.data.new_empty(num_experts, 2 * inner, gate.in_features)
    down_XEI = down.data.new_empty(num_experts, down.out_features, down.in_features)
    del gate, down
    for expert, data in enumerate(_taken(weights.gates)):
        gate_up_XIE[expert, :inner] = data
    for expert, data in enumerate(_taken(weights.ups)):
        gate_up_XIE[expert, inner:] = data
    for expert, data in enumerate(_taken(weights.downs)):
        down_XEI[expert] = data
    return StackedExperts(gate_up_XIE, down_XEI)


def _taken(weights: list[LinearWeight]) -> Iterator[Tensor]:
    weights.reverse()
    while weights:
        weight = weights.pop()
        assert weight.scale_O is None, "stacked experts are floats"
        yield weight.data
